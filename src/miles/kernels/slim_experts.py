"""The experts of one token: two launches that read the weights of those it chose, and nothing else.

Shapes: T = 1 token, k experts, E of them in all, D features, I intermediate, F = 2I; N = k rows, K columns of a tile.

Where a token is alone there is nothing to sort: a program asks the router's answer which expert's rows are its own.
Results are rounded, and added up, where and in the order in which they are among other tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton
from miles.kernels.gated import Kind, combine

# The most a program asks for at once: more would not fit its registers.
_ELEMENTS = 16384


def alone(x_TD: Tensor, experts_Tk: Tensor, first_EFD: Tensor, down_EDI: Tensor) -> bool:
    """Whether the experts of ``x_TD`` can be had here: one token, gates and ups one after the other."""
    if not (ready(x_TD) and len(x_TD) == 1 and x_TD.is_contiguous()):
        return False
    inner, chosen = down_EDI.shape[2], 1 << (experts_Tk.shape[1] - 1).bit_length()
    return max(2 * x_TD.shape[1], chosen * inner) <= _ELEMENTS and first_EFD.shape[1] == 2 * inner


def experts_of_one(
    x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, first_EFD: Tensor, down_EDI: Tensor, kind: Kind
) -> Tensor:
    """The weighted sum of the token's experts."""
    width, inner, chosen = x_TD.shape[1], down_EDI.shape[2], experts_Tk.shape[1]
    inner_kI = torch.empty(chosen, inner, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    _open[(inner, chosen)](
        *(x_TD, experts_Tk, first_EFD, inner_kI, inner),
        WIDTH=width,
        KIND=kind,
        K=triton.next_power_of_2(width),
        num_warps=4,
        num_stages=1,
        **early(x_TD.device),
    )
    _close[(width,)](
        *(inner_kI, weights_Tk, experts_Tk, down_EDI, out_TD, width),
        INNER=inner,
        CHOSEN=chosen,
        N=triton.next_power_of_2(chosen),
        K=triton.next_power_of_2(inner),
        num_warps=4,
        num_stages=1,
        **early(x_TD.device),
    )
    return out_TD


@jit
def _open(
    x_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inner: tl.tensor,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One channel between the products, of one chosen expert."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    channel, choice = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    k_K = tl.arange(0, K)
    at_K = weight_ptr + (expert * 2 * inner + channel) * WIDTH + k_K
    gate_K = tl.load(at_K, k_K < WIDTH, other=0.0).to(tl.float32)
    up_K = tl.load(at_K + inner * WIDTH, k_K < WIDTH, other=0.0).to(tl.float32)
    x_K = tl.load(x_ptr + k_K, k_K < WIDTH, other=0.0).to(tl.float32)
    kept = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    gate, up = tl.sum(gate_K * x_K, 0).to(kept), tl.sum(up_K * x_K, 0).to(kept)
    tl.store(out_ptr + choice * inner + channel, combine(gate, up, KIND, True).to(kept))


@jit
def _close(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    down_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    INNER: tl.constexpr,
    CHOSEN: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One feature, of all chosen experts."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    feature = tl.program_id(0).to(tl.int64)
    n_N, k_K = tl.arange(0, N), tl.arange(0, K)
    seen_NK = (n_N < CHOSEN)[:, None] & (k_K < INNER)[None, :]
    expert_N = tl.load(experts_ptr + n_N, n_N < CHOSEN, other=0).to(tl.int64)
    at_NK = down_ptr + ((expert_N * width + feature) * INNER)[:, None] + k_K[None, :]
    down_NK = tl.load(at_NK, seen_NK, other=0.0).to(tl.float32)
    x_NK = tl.load(x_ptr + n_N[:, None] * INNER + k_K[None, :], seen_NK, other=0.0).to(tl.float32)
    weight_N = tl.load(weights_ptr + n_N, n_N < CHOSEN, other=0.0).to(tl.float32)
    kept = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    part_N = tl.sum(down_NK * x_NK, 1).to(kept).to(tl.float32) * weight_N
    tl.store(out_ptr + feature, tl.sum(part_N, 0).to(kept))
