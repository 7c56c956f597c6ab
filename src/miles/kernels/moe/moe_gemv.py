"""MoE GEMV: the experts of a single token in two kernels that read only the selected experts' weights.

Shapes: T = 1 token, k experts, E of them in all, D features, I intermediate, F = 2I; N = k rows, K columns of a tile.

With a single token there is nothing to sort: a program looks up the expert of its rows in the router's output. Programs
are persistent and take one output after the other, prefetching the weights of the next. Results are rounded, and
summed, where and in the order in which they are in larger batches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.runtime.triton_compat import (
    count_sms,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    use_triton_inference,
)

# The most elements a program loads at once: more would not fit its registers.
_MAX_ELEMENTS = 16384
# The most resident programs per SM of either kernel, and the bytes they may load together.
_GATE_UP_RESIDENT = 8
_DOWN_RESIDENT = 4
_MAX_BYTES_IN_FLIGHT = 65536


def can_use_moe_gemv(x_TD: Tensor, experts_Tk: Tensor, first_EFD: Tensor, down_EDI: Tensor) -> bool:
    """Whether the MoE GEMV applies: one token, gates and ups concatenated."""
    if not (use_triton_inference(x_TD) and len(x_TD) == 1 and x_TD.is_contiguous()):
        return False
    inner, num_selected = down_EDI.shape[2], 1 << (experts_Tk.shape[1] - 1).bit_length()
    return max(2 * x_TD.shape[1], num_selected * inner) <= _MAX_ELEMENTS and first_EFD.shape[1] == 2 * inner


def moe_gemv(
    x_TD: Tensor, weights_Tk: Tensor, experts_Tk: Tensor, first_EFD: Tensor, down_EDI: Tensor, kind: ActivationKind
) -> Tensor:
    """The weighted sum of the token's experts."""
    width, inner, num_selected = x_TD.shape[1], down_EDI.shape[2], experts_Tk.shape[1]
    inner_kI = torch.empty(num_selected, inner, dtype=x_TD.dtype, device=x_TD.device)
    out_TD = torch.empty_like(x_TD)
    gate_up_width, down_rows, down_width = (1 << (each - 1).bit_length() for each in (width, num_selected, inner))
    gate_up_programs = _count_programs(
        num_selected * inner, _GATE_UP_RESIDENT, 2 * gate_up_width * x_TD.itemsize, x_TD.device
    )
    down_programs = _count_programs(width, _DOWN_RESIDENT, down_rows * down_width * x_TD.itemsize, x_TD.device)
    # Nothing may be launched between the two: the second relies on what the first waited for.
    tensors = (x_TD, experts_Tk, first_EFD, inner_kI)
    scalars = (inner, num_selected * inner)
    _gate_up_kernel[(gate_up_programs,)](
        *tensors,
        *scalars,
        WIDTH=width,
        ACTIVATION=kind,
        K=gate_up_width,
        num_warps=4,
        num_stages=1,
        **pdl_options(x_TD.device),
    )
    _down_kernel[(down_programs,)](
        inner_kI,
        weights_Tk,
        experts_Tk,
        down_EDI,
        out_TD,
        width,
        INNER=inner,
        SELECTED=num_selected,
        N=down_rows,
        K=down_width,
        num_warps=4,
        num_stages=1,
        **pdl_options(x_TD.device),
    )
    return out_TD


def _count_programs(units: int, max_resident: int, bytes_each: int, device: torch.device) -> int:
    """The programs of a launch that load so many bytes each, all resident from the start."""
    return min(units, count_sms(device) * max(1, min(max_resident, _MAX_BYTES_IN_FLIGHT // bytes_each)))


@jit
def _gate_up_kernel(
    x_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    inner: tl.tensor,
    units: tl.tensor,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Intermediate channels of the selected experts, one expert after the other."""
    if PDL:
        # Wait first: once the down kernel may start, all that ran before this kernel is complete and readable.
        gdc_wait()
        gdc_launch_dependents()
    first, step = tl.program_id(0), tl.num_programs(0)
    k_K = tl.arange(0, K)
    gate_K, up_K = _load_gate_up(experts_ptr, weight_ptr, first, inner, units, WIDTH, K)
    x_K = tl.load(x_ptr + k_K, k_K < WIDTH, other=0.0).to(tl.float32)
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    for unit in range(first, units, step):  # pyright: ignore[reportArgumentType]
        next_gate_K, next_up_K = _load_gate_up(experts_ptr, weight_ptr, unit + step, inner, units, WIDTH, K)
        gate = tl.sum(gate_K.to(tl.float32) * x_K, 0).to(out_dtype)
        up = tl.sum(up_K.to(tl.float32) * x_K, 0).to(out_dtype)
        tl.store(out_ptr + unit, activate_and_multiply(gate, up, ACTIVATION, True).to(out_dtype))
        gate_K, up_K = next_gate_K, next_up_K


@jit
def _load_gate_up(
    experts_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    unit: tl.tensor,
    inner: tl.tensor,
    units: tl.tensor,
    WIDTH: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """The gate and up weights of a channel; nothing is read past the last."""
    k_K = tl.arange(0, K)
    choice, channel = unit // inner, unit % inner
    expert = tl.load(experts_ptr + choice, unit < units, other=0).to(tl.int64)
    at_K = weight_ptr + (expert * 2 * inner + channel) * WIDTH + k_K
    valid_K = (k_K < WIDTH) & (unit < units)
    return tl.load(at_K, valid_K, other=0.0), tl.load(at_K + inner * WIDTH, valid_K, other=0.0)


@jit
def _down_kernel(
    x_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    down_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    INNER: tl.constexpr,
    SELECTED: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Output features, each over all selected experts."""
    if PDL:
        gdc_launch_dependents()
    first, step = tl.program_id(0), tl.num_programs(0)
    n_N, k_K = tl.arange(0, N), tl.arange(0, K)
    valid_NK = (n_N < SELECTED)[:, None] & (k_K < INNER)[None, :]
    # The gate-up kernel lets this one start after its own wait, so the router's output is complete; only the
    # intermediate channels may not be. Loads bypass L1, which only the wait is sure to invalidate.
    expert_N = tl.load(experts_ptr + n_N, n_N < SELECTED, other=0, cache_modifier=".cg").to(tl.int64)
    weight_N = tl.load(weights_ptr + n_N, n_N < SELECTED, other=0.0, cache_modifier=".cg").to(tl.float32)
    at_NK = down_ptr + (expert_N * width * INNER)[:, None] + k_K[None, :]
    down_NK = tl.load(at_NK + first * INNER, valid_NK, other=0.0)
    if PDL:
        gdc_wait()
    x_at_NK = x_ptr + n_N[:, None] * INNER + k_K[None, :]
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    for feature in range(first, width, step):  # pyright: ignore[reportArgumentType]
        # Loaded every time: keeping it would take registers from the other resident programs.
        x_NK = tl.load(x_at_NK, valid_NK, other=0.0)
        next_feature = feature + step
        next_NK = tl.load(at_NK + next_feature * INNER, valid_NK & (next_feature < width), other=0.0)
        part_N = tl.sum(down_NK.to(tl.float32) * x_NK.to(tl.float32), 1).to(out_dtype).to(tl.float32) * weight_N
        tl.store(out_ptr + feature, tl.sum(part_N, 0).to(out_dtype))
        down_NK = next_NK
