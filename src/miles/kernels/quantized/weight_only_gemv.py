"""Weight-only GEMV: one row times a packed INT8, INT4, MXFP4 or NVFP4 weight, at the speed of reading the bytes.

Shapes: E experts, N outputs, K in; a program has N rows of G groups with S stored bytes each; C = G * S bytes.

As in ``fused.gemv``, every program loads whole packed rows at once, with PDL before the input is ready. At this speed
there are about three instructions for a value, so values are not converted one by one:

- INT4: the half of a byte is put into the mantissa of a float between 1 and 2, which takes one instruction, and what
  that adds is subtracted from the sum of the group.
- E2M1: exponent and mantissa are put where float32 has them. That is the value times 2**-126 (a subnormal number for
  0.5), and the input and the scale are multiplied by 2**63 each.

Even and odd columns are summed beside each other, so nothing is interleaved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.quantized.packed_weight import decode_scale, kernel_scale
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["GemvTile", "expert_gemv", "select_gemv_tile", "weight_only_gemv"]


class GemvTile(NamedTuple):
    """Outputs of a program (with a gate, twice as many rows) and its warps."""

    outputs: int
    warps: int


# The most bytes of a row that are in flight at once, a power of two, and the tiles by the most bytes of a row.
MAX_HEAD = 16384
TILES = ((2048, GemvTile(8, 4)), (8192, GemvTile(8, 8)), (1 << 62, GemvTile(4, 8)))


def weight_only_gemv(
    x_1K: Tensor,
    weight: QuantizedTensor,
    bias_N: Tensor | None = None,
    kind: ActivationKind | None = None,
    tile: GemvTile | None = None,
) -> Tensor:
    """One row times a weight, plus a bias; with ``kind`` the second half of the outputs gates the first.

    ``tile`` is for benchmarks.
    """
    outputs = weight.shape[-2] // (1 if kind is None else 2)
    out_1N = torch.empty(1, outputs, dtype=x_1K.dtype, device=x_1K.device)
    _launch(x_1K, weight, bias_N, None, out_1N, kind, False, tile)
    return out_1N


def expert_gemv(
    x: Tensor,
    weight: QuantizedTensor,
    bias_EN: Tensor | None,
    experts_k: Tensor,
    kind: ActivationKind | None = None,
    *,
    interleaved: bool = False,
) -> Tensor:
    """The rows [k, N] of a single token's experts: of its row [1, K], or of one row for each expert [k, K]."""
    outputs = weight.shape[-2] // (1 if kind is None else 2)
    out_kN = torch.empty(experts_k.numel(), outputs, dtype=x.dtype, device=x.device)
    _launch(x, weight, bias_EN, experts_k, out_kN, kind, interleaved, None)
    return out_kN


def select_gemv_tile(stored: int) -> GemvTile:
    """The tile for rows of so many bytes."""
    return next(tile for most, tile in TILES if stored <= most)


def _launch(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    experts_k: Tensor | None,
    out: Tensor,
    kind: ActivationKind | None,
    interleaved: bool,
    tile: GemvTile | None,
) -> None:
    assert x.is_contiguous() and weight.data.is_contiguous() and weight.row_block == 1
    (inputs, stored), outputs = (x.shape[-1], weight.data.shape[-1]), out.shape[1]
    tile = tile or select_gemv_tile(stored)
    head = min(MAX_HEAD, 1 << (stored.bit_length() - 1))
    rest = triton.next_power_of_2(stored % head) if stored % head else 0
    # Bytes of a group; a group that is wider than the row is all of it.
    whole = weight.column_block >= inputs
    group = max(head, rest) if whole else weight.column_block * weight.format.bits // 8
    with device_guard(x):
        _gemv_kernel[(triton.cdiv(outputs, tile.outputs), len(out))](
            x,
            weight.data,
            kernel_scale(weight),
            weight.zero,
            weight.global_scale,
            bias,
            experts_k,
            out,
            outputs,
            inputs if len(x) > 1 else 0,
            STORED=stored,
            GROUPS=weight.scale.shape[-1],
            ELEMENT=weight.format.element,
            SCALE=weight.format.scale,
            ZERO=weight.zero is not None,
            GLOBAL=weight.global_scale is not None,
            BIAS=bias is not None,
            EXPERTS=experts_k is not None,
            ACTIVATION=kind or "",
            INTERLEAVED=interleaved,
            N=tile.outputs,
            H=head,
            R=rest,
            GROUP=group,
            num_warps=tile.warps,
            num_stages=1,
            **pdl_options(x.device),
        )


@jit
def _gemv_kernel(
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    global_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    outputs: tl.tensor,
    x_stride: tl.tensor,
    STORED: tl.constexpr,
    GROUPS: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
    n_N = tl.program_id(0) * N + tl.arange(0, N)
    choice = tl.program_id(1)
    expert = tl.full((), 0, tl.int64)
    if EXPERTS:
        # The router's output, on which the weights depend, may be that of the previous kernel.
        if PDL:
            gdc_wait()
        expert = tl.load(experts_ptr + choice).to(tl.int64)
    gate_N = expert * (outputs if ACTIVATION == "" else 2 * outputs) + (2 * n_N if INTERLEAVED else n_N)
    up_N = gate_N + (1 if INTERLEAVED else outputs)
    valid_N = n_N < outputs
    tensors = (data_ptr, scale_ptr, zero_ptr)
    # Weights are loaded while the previous kernel still computes the row.
    gate = _load_rows(gate_N, valid_N, *tensors, STORED, GROUPS, ZERO, H, R, GROUP)
    up = gate
    if ACTIVATION != "":
        up = _load_rows(up_N, valid_N, *tensors, STORED, GROUPS, ZERO, H, R, GROUP)
    if PDL and not EXPERTS:
        gdc_wait()
    x_ptr += choice * x_stride
    x_head = _load_input(x_ptr, 0, STORED, ELEMENT, H, GROUP)
    x_rest = x_head
    if R > 0:
        x_rest = _load_input(x_ptr, STORED // H * H, STORED, ELEMENT, R, GROUP)
    row = (gate_N, valid_N, expert, x_ptr, *tensors, global_ptr, bias_ptr)
    settings = (STORED, GROUPS, ELEMENT, SCALE, ZERO, GLOBAL, BIAS, H, R, GROUP)
    out_N = _dot_rows(*gate, *x_head, *x_rest, *row, *settings)
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    if ACTIVATION != "":
        row = (up_N, valid_N, expert, x_ptr, *tensors, global_ptr, bias_ptr)
        up_out_N = _dot_rows(*up, *x_head, *x_rest, *row, *settings)
        out_N = activate_and_multiply(out_N.to(out_dtype), up_out_N.to(out_dtype), ACTIVATION, True)
    tl.store(out_ptr + choice * outputs + n_N, out_N.to(out_dtype), valid_N)


@jit
def _load_rows(
    row_N: tl.tensor,
    valid_N: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    STORED: tl.constexpr,
    GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """The first bytes of each row, and the remainder beyond all whole blocks."""
    head = _load_packed(row_N, valid_N, data_ptr, scale_ptr, zero_ptr, 0, STORED, GROUPS, ZERO, H, GROUP)
    rest = head
    if R > 0:
        start = STORED // H * H
        rest = _load_packed(row_N, valid_N, data_ptr, scale_ptr, zero_ptr, start, STORED, GROUPS, ZERO, R, GROUP)
    return head[0], head[1], head[2], rest[0], rest[1], rest[2]


@jit
def _dot_rows(
    head_NGS: tl.tensor,
    head_scale_NG: tl.tensor,
    head_zero_NG: tl.tensor,
    rest_NGS: tl.tensor,
    rest_scale_NG: tl.tensor,
    rest_zero_NG: tl.tensor,
    head_even_GS: tl.tensor,
    head_odd_GS: tl.tensor,
    rest_even_GS: tl.tensor,
    rest_odd_GS: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    expert: tl.tensor,
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    global_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    STORED: tl.constexpr,
    GROUPS: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    BIAS: tl.constexpr,
    H: tl.constexpr,
    R: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """The dot products of whole rows with the input, with the global scale and the bias, in float32."""
    out_N = _dot(head_NGS, head_scale_NG, head_zero_NG, head_even_GS, head_odd_GS, ELEMENT, SCALE, ZERO)
    for start in range(H, STORED // H * H, H):
        even_GS, odd_GS = _load_input(x_ptr, start, STORED, ELEMENT, H, GROUP)
        more = _load_packed(row_N, valid_N, data_ptr, scale_ptr, zero_ptr, start, STORED, GROUPS, ZERO, H, GROUP)
        out_N += _dot(*more, even_GS, odd_GS, ELEMENT, SCALE, ZERO)
    if R > 0:
        out_N += _dot(rest_NGS, rest_scale_NG, rest_zero_NG, rest_even_GS, rest_odd_GS, ELEMENT, SCALE, ZERO)
    if GLOBAL:
        out_N *= tl.load(global_ptr + expert)
    if BIAS:
        out_N += tl.load(bias_ptr + row_N, valid_N, other=0.0).to(tl.float32)
    return out_N


@jit
def _load_packed(
    row_N: tl.tensor,
    valid_N: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    start: tl.tensor,
    STORED: tl.constexpr,
    GROUPS: tl.constexpr,
    ZERO: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """The bytes of each row from ``start`` on, and the scales and zero points of their groups."""
    S: tl.constexpr = GROUP if GROUP < C else C
    G: tl.constexpr = C // S
    g_G = tl.arange(0, G)
    at_GS = start + g_G[:, None] * S + tl.arange(0, S)[None, :]
    valid_NGS = valid_N[:, None, None] & (at_GS < STORED)[None, :, :]
    data_NGS = tl.load(data_ptr + row_N[:, None, None] * STORED + at_GS[None, :, :], valid_NGS, other=0)
    group_G = g_G * 0 if GROUPS == 1 else start // GROUP + g_G
    at_NG = row_N[:, None] * GROUPS + group_G[None, :]
    valid_NG = valid_N[:, None] & (group_G < GROUPS)[None, :]
    scale_NG = tl.load(scale_ptr + at_NG, valid_NG, other=0)
    zero_NG = scale_NG
    if ZERO:
        zero_NG = tl.load(zero_ptr + at_NG, valid_NG, other=0)
    return data_NGS, scale_NG, zero_NG


@jit
def _load_input(
    x_ptr: tl.tensor,
    start: tl.tensor,
    STORED: tl.constexpr,
    ELEMENT: tl.constexpr,
    C: tl.constexpr,
    GROUP: tl.constexpr,
) -> Any:
    """The inputs of the even and of the odd columns; with one value a byte, all inputs twice."""
    S: tl.constexpr = GROUP if GROUP < C else C
    G: tl.constexpr = C // S
    at_GS = start + tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :]
    if ELEMENT == "int8":
        x_GS = tl.load(x_ptr + at_GS, at_GS < STORED, other=0.0).to(tl.float32)
        return x_GS, x_GS
    else:
        at_GS2 = 2 * at_GS[:, :, None] + tl.arange(0, 2)[None, None, :]
        x_GS2 = tl.load(x_ptr + at_GS2, at_GS2 < 2 * STORED, other=0.0).to(tl.float32)
        return tl.split(x_GS2)


@jit
def _dot(
    data_NGS: tl.tensor,
    scale_NG: tl.tensor,
    zero_NG: tl.tensor,
    even_GS: tl.tensor,
    odd_GS: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
) -> Any:
    """The sum over all columns of values times inputs times scales."""
    scale_NG = decode_scale(scale_NG, SCALE)
    if ELEMENT == "int8":
        sum_NG = tl.sum(data_NGS.to(tl.float32) * even_GS[None, :, :], 2)
    elif ELEMENT == "int4":
        # 1 + low / 256 and 1 + high / 16.
        bits_NGS = data_NGS.to(tl.int32) << 15
        low_NGS = ((bits_NGS & (15 << 15)) | 0x3F800000).to(tl.float32, bitcast=True)
        high_NGS = ((bits_NGS & (15 << 19)) | 0x3F800000).to(tl.float32, bitcast=True)
        even_GS, odd_GS = even_GS * 256.0, odd_GS * 16.0
        sum_NG = _sum_pairs(low_NGS * even_GS[None, :, :], high_NGS * odd_GS[None, :, :])
        added_G = tl.sum(even_GS + odd_GS, 1)
        step_G = tl.sum(even_GS * (1.0 / 256) + odd_GS * (1.0 / 16), 1)
        if ZERO:
            sum_NG -= added_G[None, :] + zero_NG.to(tl.float32) * step_G[None, :]
        else:
            sum_NG -= (added_G + 8.0 * step_G)[None, :]
    else:
        bits_NGS = data_NGS.to(tl.int32)
        # Shifting back repeats the sign, of which one bit is kept.
        low_NGS = (((bits_NGS << 28) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)
        high_NGS = (((bits_NGS << 24) >> 6) & -0x7E400000).to(tl.float32, bitcast=True)
        factor: tl.constexpr = 9223372036854775808.0  # 2**63
        even_GS, odd_GS = even_GS * factor, odd_GS * factor
        sum_NG = _sum_pairs(low_NGS * even_GS[None, :, :], high_NGS * odd_GS[None, :, :]) * factor
    return tl.sum(sum_NG * scale_NG, 1)


@jit
def _sum_pairs(a_NGS: tl.tensor, b_NGS: tl.tensor) -> Any:
    """The sum of both over S. One reduction of products, so that each is a fused multiply-add."""
    N: tl.constexpr = a_NGS.shape[0]
    G: tl.constexpr = a_NGS.shape[1]
    S: tl.constexpr = a_NGS.shape[2]
    return tl.sum(tl.reshape(tl.join(a_NGS, b_NGS), (N, G, 2 * S)), 2)
