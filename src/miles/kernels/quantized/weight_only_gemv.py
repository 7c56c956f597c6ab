"""Weight-only GEMV: one row times a packed INT8, INT4, MXFP4 or NVFP4 weight, at the speed of reading the bytes.

Shapes: E experts, N outputs, K in; a program has N rows of G groups with S stored units each. A unit is a byte of INT8,
or an int32 with eight 4-bit values.

As in ``fused.gemv``, programs load whole packed rows at once, with PDL before the input is ready. They are persistent:
the input is prepared once, and the next rows are loaded while these are multiplied. At this speed there are about three
instructions for a value, so values are not converted one by one:

- INT4: a byte is put into the mantissa of a float between 1 and 2, and its high half alone into another. Even columns
  are the difference of the two; what the ones of the others add is subtracted from the sum of the group.
- E2M1: exponent and mantissa are put where float32 has them. That is the value times 2**-126 (a subnormal number for
  0.5), and the input and the sum are multiplied by 2**63 each.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.quantized.packed_weight import decode_scale, kernel_scale
from miles.kernels.runtime.triton_compat import (
    count_sms,
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    register_limit,
    tl,
    triton,
)
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = ["GemvTile", "expert_gemv", "select_gemv_tile", "supports_gemv", "weight_only_gemv"]


class GemvTile(NamedTuple):
    """Rows that a program has at once (with a gate, half as many outputs), its warps, and programs of an SM.

    ``registers`` is the most that a thread may use on an NVIDIA GPU, so that these programs fit.
    """

    rows: int
    warps: int
    resident: int
    registers: int = 168


# The most units of a row that are in flight at once, a power of two, and the tiles by the most bytes of a row.
MAX_HEAD = 16384
TILES = ((2048, GemvTile(2, 4, 4, 128)), (1 << 62, GemvTile(2, 8, 2, 128)))


def supports_gemv(weight: QuantizedTensor) -> bool:
    """Whether packed rows are whole units."""
    return weight.format.bits == 8 or weight.data.shape[-1] % 4 == 0


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
    inputs, outputs = x.shape[-1], out.shape[1]
    tile = tile or select_gemv_tile(weight.data.shape[-1])
    data = weight.data if weight.format.bits == 8 else weight.data.view(torch.int32)
    stored, per_program = data.shape[-1], tile.rows if kind is None else max(1, tile.rows // 2)
    head = min(MAX_HEAD, 1 << (stored.bit_length() - 1))
    rest = triton.next_power_of_2(stored % head) if stored % head else 0
    # Units of a group; a group that is wider than the row is all of it.
    whole = weight.column_block >= inputs
    group = max(head, rest) if whole else weight.column_block // (1 if weight.format.bits == 8 else 8)
    with device_guard(x):
        tiles = triton.cdiv(outputs, per_program)
        programs = min(tiles, max(1, tile.resident * count_sms(x.device) // len(out)))
        _gemv_kernel[(programs, len(out))](
            x,
            data,
            kernel_scale(weight),
            weight.zero,
            weight.global_scale,
            bias,
            experts_k,
            out,
            outputs,
            inputs if len(x) > 1 else 0,
            tiles,
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
            N=per_program,
            H=head,
            R=rest,
            GROUP=group,
            num_warps=tile.warps,
            num_stages=1,
            **register_limit(tile.registers),
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
    tiles: tl.tensor,
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
    first, step = tl.program_id(0), tl.num_programs(0)
    choice = tl.program_id(1)
    expert = _load_expert(experts_ptr, choice, EXPERTS, PDL)
    begin = expert * (outputs if ACTIVATION == "" else 2 * outputs)
    up_offset = 1 if INTERLEAVED else outputs
    n_N = first * N + tl.arange(0, N)
    row_N = begin + (2 * n_N if INTERLEAVED else n_N)
    rows = _load_rows(row_N, n_N < outputs, data_ptr, scale_ptr, zero_ptr, STORED, GROUPS, ZERO, H, R, GROUP)
    h, hs, hz, r, rs, rz = rows
    uh, uhs, uhz, ur, urs, urz = rows
    if ACTIVATION != "":
        uh, uhs, uhz, ur, urs, urz = _load_rows(
            row_N + up_offset, n_N < outputs, data_ptr, scale_ptr, zero_ptr, STORED, GROUPS, ZERO, H, R, GROUP
        )
    if PDL and not EXPERTS:
        gdc_wait()
    x_ptr += choice * x_stride
    x_head = _load_input(x_ptr, 0, STORED, ELEMENT, H, GROUP)
    x_rest = x_head
    if R > 0:
        x_rest = _load_input(x_ptr, STORED // H * H, STORED, ELEMENT, R, GROUP)
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    for tile in range(first, tiles, step):  # pyright: ignore[reportArgumentType]
        n_N = tile * N + tl.arange(0, N)
        next_N = n_N + step * N
        row_N = begin + (2 * n_N if INTERLEAVED else n_N)
        next_row_N = begin + (2 * next_N if INTERLEAVED else next_N)
        more = (n_N < outputs, expert, x_ptr, data_ptr, scale_ptr, zero_ptr, global_ptr, bias_ptr)
        now = (h, hs, hz, r, rs, rz)
        h, hs, hz, r, rs, rz = _load_rows(
            next_row_N, next_N < outputs, data_ptr, scale_ptr, zero_ptr, STORED, GROUPS, ZERO, H, R, GROUP
        )
        out_N = _dot_rows(
            *now, x_head, x_rest, row_N, *more, STORED, GROUPS, ELEMENT, SCALE, ZERO, GLOBAL, BIAS, H, R, GROUP
        )
        if ACTIVATION != "":
            now = (uh, uhs, uhz, ur, urs, urz)
            row_N = row_N + up_offset
            uh, uhs, uhz, ur, urs, urz = _load_rows(
                next_row_N + up_offset,
                next_N < outputs,
                data_ptr,
                scale_ptr,
                zero_ptr,
                STORED,
                GROUPS,
                ZERO,
                H,
                R,
                GROUP,
            )
            up_out_N = _dot_rows(
                *now, x_head, x_rest, row_N, *more, STORED, GROUPS, ELEMENT, SCALE, ZERO, GLOBAL, BIAS, H, R, GROUP
            )
            out_N = activate_and_multiply(out_N.to(out_dtype), up_out_N.to(out_dtype), ACTIVATION, True)
        tl.store(out_ptr + choice * outputs + n_N, out_N.to(out_dtype), n_N < outputs)


@jit
def _load_expert(experts_ptr: tl.tensor, choice: tl.tensor, EXPERTS: tl.constexpr, PDL: tl.constexpr) -> Any:
    """The expert of a choice; 0 without any. The router's output may be that of the previous kernel."""
    expert = tl.full((), 0, tl.int64)
    if EXPERTS:
        if PDL:
            gdc_wait()
        expert = tl.load(experts_ptr + choice).to(tl.int64)
    return expert


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
    """The first units of each row, and the remainder beyond all whole blocks.

    Those of the first rows are loaded while the previous kernel still computes the input.
    """
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
    x_head: tl.tensor,
    x_rest: tl.tensor,
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
    out_N = _dot(head_NGS, head_scale_NG, head_zero_NG, x_head, ELEMENT, SCALE, ZERO)
    for start in range(H, STORED // H * H, H):
        x_more = _load_input(x_ptr, start, STORED, ELEMENT, H, GROUP)
        more = _load_packed(row_N, valid_N, data_ptr, scale_ptr, zero_ptr, start, STORED, GROUPS, ZERO, H, GROUP)
        out_N += _dot(*more, x_more, ELEMENT, SCALE, ZERO)
    if R > 0:
        out_N += _dot(rest_NGS, rest_scale_NG, rest_zero_NG, x_rest, ELEMENT, SCALE, ZERO)
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
    """The inputs of each unit: a tuple of one, or of eight."""
    S: tl.constexpr = GROUP if GROUP < C else C
    G: tl.constexpr = C // S
    at_GS = start + tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :]
    if ELEMENT == "int8":
        return (tl.load(x_ptr + at_GS, at_GS < STORED, other=0.0).to(tl.float32),)
    else:
        at_GS8 = 8 * at_GS[:, :, None] + tl.arange(0, 8)[None, None, :]
        x_GS8 = tl.load(x_ptr + at_GS8, at_GS8 < 8 * STORED, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(x_GS8, (G, S, 2, 2, 2)))
        x04, x26 = tl.split(even)
        x15, x37 = tl.split(odd)
        x0, x4 = tl.split(x04)
        x2, x6 = tl.split(x26)
        x1, x5 = tl.split(x15)
        x3, x7 = tl.split(x37)
        return x0, x1, x2, x3, x4, x5, x6, x7


@jit
def _dot(
    data_NGS: tl.tensor,
    scale_NG: tl.tensor,
    zero_NG: tl.tensor,
    x: tl.tensor,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
) -> Any:
    """The sum over all columns of values times inputs times scales."""
    scale_NG = decode_scale(scale_NG, SCALE)
    if ELEMENT == "int8":
        sum_NG = tl.sum(data_NGS.to(tl.float32) * x[0][None, :, :], 2)
    elif ELEMENT == "int4":
        sum_NG = _sum_int4(data_NGS, zero_NG, x, ZERO)
    else:
        factor = 9223372036854775808.0  # 2**63
        product_NGS = _decode_e2m1(data_NGS << 28) * (x[0] * factor)[None, :, :]
        for i in tl.static_range(1, 8):  # pyright: ignore
            product_NGS += _decode_e2m1(data_NGS << (28 - 4 * i)) * (x[i] * factor)[None, :, :]
        sum_NG = tl.sum(product_NGS, 2) * factor
    return tl.sum(sum_NG * scale_NG, 1)


@jit
def _decode_e2m1(bits: tl.tensor) -> Any:
    """The topmost four bits as a float times 2**-126. Shifting back repeats the sign, of which one bit is kept."""
    return ((bits >> 6) & -0x7E400000).to(tl.float32, bitcast=True)


@jit
def _sum_int4(data_NGS: tl.tensor, zero_NG: tl.tensor, x: tl.tensor, ZERO: tl.constexpr) -> Any:
    """The sums of groups: of each byte as 1 + byte / 256, and of its high half as 1 + half / 16."""
    product_NGS = _add_byte(tl.zeros(data_NGS.shape, tl.float32), data_NGS << 15, x[0], x[1])
    product_NGS = _add_byte(product_NGS, data_NGS << 7, x[2], x[3])
    product_NGS = _add_byte(product_NGS, data_NGS >> 1, x[4], x[5])
    product_NGS = _add_byte(product_NGS, data_NGS >> 9, x[6], x[7])
    low_GS, high_GS = (x[0] + x[2]) + (x[4] + x[6]), (x[1] + x[3]) + (x[5] + x[7])
    ones_G, step_G = tl.sum(high_GS, 1) * 0.0625, tl.sum(low_GS + high_GS, 1)
    sum_NG = 256.0 * (tl.sum(product_NGS, 2) - ones_G[None, :])
    if ZERO:
        return sum_NG - zero_NG.to(tl.float32) * step_G[None, :]
    else:
        return sum_NG - 8.0 * step_G[None, :]


@jit
def _add_byte(sum_NGS: tl.tensor, bits_NGS: tl.tensor, even_GS: tl.tensor, odd_GS: tl.tensor) -> Any:
    """Add the byte at bits 15 to 22: its low half / 256 times the even input, its high half / 256 times the odd one."""
    both_NGS = (bits_NGS & 0x7F8000) | 0x3F800000
    high_NGS = (both_NGS & 0x7FF80000).to(tl.float32, bitcast=True)
    sum_NGS += both_NGS.to(tl.float32, bitcast=True) * even_GS[None, :, :]
    return sum_NGS + high_NGS * (odd_GS * 0.0625 - even_GS)[None, :, :]
