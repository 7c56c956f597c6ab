"""The products of groups of rows, and the weighted sums of tokens' rows, as device code.

Shapes: T tokens, k groups a token, R = T * k rows sorted by group, E groups, N out, K in, D features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, on, tl, triton
from miles.kernels.exact.product_code import launch
from miles.kernels.grouped import Rows

_BLOCK = 1024


def multiply(x_RK: Tensor, weight_ENK: Tensor, bias_EN: Tensor | None, rows: Rows) -> Tensor:
    """Each row times its group's weight, plus its bias; nothing waits for the device."""
    bias_EN = None if bias_EN is None else bias_EN.contiguous()
    return launch(x_RK, weight_ENK, bias_EN, rows.ends_E, x_RK.dtype)


def add_choices(x_RD: Tensor, weights_Tk: Tensor, place_R: Tensor | None = None) -> Tensor:
    """The weighted sum of each token's rows: those that follow each other, or lie where ``place_R`` says."""
    (tokens, per_token), width = weights_Tk.shape, x_RD.shape[-1]
    out_TD = torch.empty(tokens, width, dtype=x_RD.dtype, device=x_RD.device)
    if not tokens:
        return out_TD
    block = min(triton.next_power_of_2(width), _BLOCK)
    with on(x_RD):
        _add_choices[(tokens, triton.cdiv(width, block))](
            *(x_RD.contiguous(), weights_Tk.contiguous(), place_R, out_TD, width),
            PER_TOKEN=per_token,
            PLACED=place_R is not None,
            BLOCK=block,
            num_warps=4,
            **early(x_RD.device),
        )
    return out_TD


@jit
def _add_choices(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    place_ptr: tl.tensor,
    out_ptr: tl.tensor,
    width: tl.tensor,
    PER_TOKEN: tl.constexpr,
    PLACED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_D = column_D < width
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        row = token * PER_TOKEN + choice
        weight = tl.load(weights_ptr + row).to(tl.float32)
        if PLACED:
            row = tl.load(place_ptr + row).to(tl.int64)
        row_D = tl.load(rows_ptr + row * width + column_D, inside_D, other=0.0).to(tl.float32)
        # One rounding, as it is written: the compiler is left no choice.
        sum_D = tl.fma(row_D, weight, sum_D)
    tl.store(out_ptr + token * width + column_D, sum_D, inside_D)
