"""The experts of one token: two launches that read the weights of those it chose, and nothing else.

Shapes: T = 1 token, k experts, E of them in all, D features, I intermediate, F = 2I; N = k rows, K columns of a tile.

Where a token is alone there is nothing to sort: a program asks the router's answer which expert's rows are its own.
Programs stay on their processor and take one output after the other, with the weights of the next on their way.
Results are rounded, and added up, where and in the order in which they are among other tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, processors, ready, tl
from miles.kernels.gated import Kind, combine

# The most a program asks for at once: more would not fit its registers.
_ELEMENTS = 16384
# The most programs that a processor has at once, of either launch, and the bytes they may ask for together.
_OPENING, _CLOSING, _UNDER_WAY = 8, 4, 65536


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
    k_open, n_close, k_close = (1 << (each - 1).bit_length() for each in (width, chosen, inner))
    opening = _programs(chosen * inner, _OPENING, 2 * k_open * x_TD.itemsize, x_TD.device)
    closing = _programs(width, _CLOSING, n_close * k_close * x_TD.itemsize, x_TD.device)
    # Nothing may be launched between the two: the second counts on what the first waited for.
    _open[(opening,)](
        *(x_TD, experts_Tk, first_EFD, inner_kI, inner, chosen * inner),
        WIDTH=width,
        KIND=kind,
        K=k_open,
        num_warps=4,
        num_stages=1,
        **early(x_TD.device),
    )
    _close[(closing,)](
        *(inner_kI, weights_Tk, experts_Tk, down_EDI, out_TD, width),
        INNER=inner,
        CHOSEN=chosen,
        N=n_close,
        K=k_close,
        num_warps=4,
        num_stages=1,
        **early(x_TD.device),
    )
    return out_TD


def _programs(units: int, most: int, asked: int, device: torch.device) -> int:
    """The programs of a launch, of which one asks for so many bytes: all are on their processor from the start."""
    return min(units, processors(device) * max(1, min(most, _UNDER_WAY // asked)))


@jit
def _open(
    x_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inner: tl.tensor,
    units: tl.tensor,
    WIDTH: tl.constexpr,
    KIND: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Channels between the products, those of one chosen expert after those of another."""
    if EARLY:
        # First the wait: once ``_close`` may start, all that ran before this kernel is over, and is there to be read.
        gdc_wait()
        gdc_launch_dependents()
    first, step = tl.program_id(0), tl.num_programs(0)
    k_K = tl.arange(0, K)
    gate_K, up_K = _ask(experts_ptr, weight_ptr, first, inner, units, WIDTH, K)
    x_K = tl.load(x_ptr + k_K, k_K < WIDTH, other=0.0).to(tl.float32)
    kept = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    for unit in range(first, units, step):  # pyright: ignore[reportArgumentType]
        next_gate_K, next_up_K = _ask(experts_ptr, weight_ptr, unit + step, inner, units, WIDTH, K)
        gate = tl.sum(gate_K.to(tl.float32) * x_K, 0).to(kept)
        up = tl.sum(up_K.to(tl.float32) * x_K, 0).to(kept)
        tl.store(out_ptr + unit, combine(gate, up, KIND, True).to(kept))
        gate_K, up_K = next_gate_K, next_up_K


@jit
def _ask(
    experts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    unit: tl.tensor,
    inner: tl.tensor,
    units: tl.tensor,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """The weights of a channel's gate and of its up; nothing is read past the last."""
    k_K = tl.arange(0, K)
    choice, channel = unit // inner, unit % inner
    expert = tl.load(experts_ptr + choice, unit < units, other=0).to(tl.int64)
    at_K = weight_ptr + (expert * 2 * inner + channel) * WIDTH + k_K
    seen_K = (k_K < WIDTH) & (unit < units)
    return tl.load(at_K, seen_K, other=0.0), tl.load(at_K + inner * WIDTH, seen_K, other=0.0)


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
    """Features, each of all chosen experts."""
    if EARLY:
        gdc_launch_dependents()
    first, step = tl.program_id(0), tl.num_programs(0)
    n_N, k_K = tl.arange(0, N), tl.arange(0, K)
    seen_NK = (n_N < CHOSEN)[:, None] & (k_K < INNER)[None, :]
    # ``_open`` let this kernel start after its own wait, so the router's answer is there; only what ``_open`` writes
    # may not be. It is read past the processor's own cache, which a wait alone is sure to clear of what was before.
    expert_N = tl.load(experts_ptr + n_N, n_N < CHOSEN, other=0, cache_modifier=".cg").to(tl.int64)
    weight_N = tl.load(weights_ptr + n_N, n_N < CHOSEN, other=0.0, cache_modifier=".cg").to(tl.float32)
    at_NK = down_ptr + (expert_N * width * INNER)[:, None] + k_K[None, :]
    down_NK = tl.load(at_NK + first * INNER, seen_NK, other=0.0)
    if EARLY:
        gdc_wait()
    x_at_NK = x_ptr + n_N[:, None] * INNER + k_K[None, :]
    kept = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    for feature in range(first, width, step):  # pyright: ignore[reportArgumentType]
        # Asked for every time: to keep it would take registers that the programs beside this one have.
        x_NK = tl.load(x_at_NK, seen_NK, other=0.0)
        after = feature + step
        next_NK = tl.load(at_NK + after * INNER, seen_NK & (after < width), other=0.0)
        part_N = tl.sum(down_NK.to(tl.float32) * x_NK.to(tl.float32), 1).to(kept).to(tl.float32) * weight_N
        tl.store(out_ptr + feature, tl.sum(part_N, 0).to(kept))
        down_NK = next_NK
