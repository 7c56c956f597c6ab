"""Triton launchers of the batch-invariant grouped GEMM and of the weighted sums of tokens' rows.

Shapes: T tokens, k groups per token, R = T * k rows sorted by group, E groups, N out, K in, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.batch_invariant.linear_triton import launch_gemm
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)

_BLOCK = 1024


def launch_grouped_gemm(x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: SortedRows) -> Tensor:
    """Each row times its group's weight, plus its bias; without a device sync."""
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    return launch_gemm(x_RK, weight_ENK, bias_EN, rows.ends_E, x_RK.dtype)


def launch_combine(x_RD: Tensor, weights_Tk: Tensor, place_R: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: consecutive ones, or those at ``place_R``."""
    (tokens, per_token), width = weights_Tk.shape, x_RD.shape[-1]
    out_TD = torch.empty(tokens, width, dtype=x_RD.dtype, device=x_RD.device)
    if not tokens:
        return out_TD
    block = min(triton.next_power_of_2(width), _BLOCK)
    with device_guard(x_RD):
        _combine_kernel[(tokens, triton.cdiv(width, block))](
            x_RD.contiguous(),
            weights_Tk.contiguous(),
            place_R,
            out_TD,
            width,
            PER_TOKEN=per_token,
            SORTED=place_R is not None,
            BLOCK=block,
            num_warps=4,
            **pdl_options(x_RD.device),
        )
    return out_TD


@jit
def _combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    place_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    PER_TOKEN: tl.constexpr,
    SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_D = column_D < width
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + choice
        weight = tl.load(weights_ptr + row).to(tl.float32)
        if SORTED:
            row = tl.load(place_ptr + row).to(tl.int64)
        row_D = tl.load(rows_ptr + row * width + column_D, valid_D, other=0.0).to(tl.float32)
        # An explicit FMA: one rounding, not left to the compiler.
        sum_D = tl.fma(row_D, weight, sum_D)
    tl.store(out_ptr + token * width + column_D, sum_D, valid_D)
