"""Weight-only GEMM in Triton: rows times a packed INT8, INT4, MXFP4 or NVFP4 weight that is dequantized in registers.

Shapes: T tokens, R rows of a token's experts, K in, N out, E experts; n, t and k are a tile's rows of the weight,
tokens and depth; P blocks of t rows sorted by expert.

A tile of the weight is rounded to the input's dtype, bitwise as ``precision.quantize.dequantize`` does. A byte has two
values, so even and odd columns are two matmuls, which leaves the values in the registers where they were decoded; sums
are in float32 and rounded once. Tiles differ in the order of the sum: this is not batch-invariant. The weight is the
left operand, so that its rows fill the instruction however few tokens there are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.fused.activation import ActivationKind, activate_and_multiply
from miles.kernels.moe.fused_moe import place_rows
from miles.kernels.quantized.packed_weight import kernel_scale, load_weight_pairs
from miles.kernels.runtime.triton_compat import (
    HAVE_TRITON,
    count_sms,
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)
from miles.precision.quantized_tensor import QuantizedTensor

__all__ = [
    "WeightOnlyTile",
    "expert_gemm",
    "list_weight_only_tiles",
    "select_weight_only_tile",
    "weight_only_gemm",
]


class WeightOnlyTile(NamedTuple):
    """Rows of the weight, tokens and depth of a tile, warps and pipeline stages."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int


# By the most tokens (per expert): ever fewer rows, until there are enough tiles for the GPU.
TILES: tuple[tuple[int, tuple[WeightOnlyTile, ...]], ...] = (
    (16, (WeightOnlyTile(64, 16, 128, 4, 4), WeightOnlyTile(32, 16, 128, 4, 5), WeightOnlyTile(16, 16, 256, 4, 4))),
    (32, (WeightOnlyTile(64, 32, 128, 4, 4), WeightOnlyTile(32, 32, 128, 4, 4))),
    (64, (WeightOnlyTile(128, 64, 64, 8, 4), WeightOnlyTile(64, 64, 128, 4, 4), WeightOnlyTile(32, 64, 128, 4, 4))),
    (1 << 62, (WeightOnlyTile(128, 128, 64, 8, 4), WeightOnlyTile(64, 128, 64, 4, 4))),
)
# Tiles of tokens that are scheduled together, to share weights in the L2 cache.
_GROUP = 8


def list_weight_only_tiles() -> list[WeightOnlyTile]:
    """Every tile that may be selected."""
    return [tile for _, tiles in TILES for tile in tiles]


def select_weight_only_tile(tokens: float, rows: int, device: torch.device, experts: int = 1) -> WeightOnlyTile:
    """The tile that is likely the fastest for so many tokens (of an expert) and rows of a weight."""
    tiles = next(tiles for most, tiles in TILES if tokens <= most)
    sms = count_sms(device)
    blocks = (max(1, -(-int(tokens) // tile.tokens)) * experts * -(-rows // tile.rows) for tile in tiles)
    return next((tile for tile, count in zip(tiles, blocks, strict=True) if count >= sms), tiles[-1])


def weight_only_gemm(
    x_TK: Tensor,
    weight: QuantizedTensor,
    bias_N: Tensor | None = None,
    kind: ActivationKind | None = None,
    tile: WeightOnlyTile | None = None,
) -> Tensor:
    """Rows times a weight, plus a bias in float32; with ``kind`` the second half of the outputs gates the first.

    ``tile`` is for benchmarks.
    """
    outputs = weight.shape[-2] // (1 if kind is None else 2)
    out_TN = torch.empty(len(x_TK), outputs, dtype=x_TK.dtype, device=x_TK.device)
    if len(x_TK):
        tile = tile or select_weight_only_tile(len(x_TK), outputs, x_TK.device)
        _launch(x_TK, weight, bias_N, out_TN, tile, None, kind)
    return out_TN


def expert_gemm(
    x: Tensor,
    weight: QuantizedTensor,
    bias_EN: Tensor | None,
    groups_R: Tensor,
    kind: ActivationKind | None = None,
    *,
    per_token: int = 1,
    interleaved: bool = False,
) -> Tensor:
    """Each row times the weight of its group: [R, N]; row r of the result is of row ``r // per_token`` of ``x``."""
    count, experts = groups_R.numel(), weight.shape[0]
    outputs = weight.shape[-2] // (1 if kind is None else 2)
    out_RN = torch.empty(count, outputs, dtype=x.dtype, device=x.device)
    if count:
        tile = select_weight_only_tile(count / experts, outputs, x.device, min(experts, count))
        places = place_rows(groups_R.reshape(-1, 1), experts, tile.tokens)
        _launch(x, weight, bias_EN, out_RN, tile, places, kind, per_token, interleaved)
    return out_RN


def _launch(
    x: Tensor,
    weight: QuantizedTensor,
    bias: Tensor | None,
    out: Tensor,
    tile: WeightOnlyTile,
    places: tuple[Tensor, Tensor] | None,
    kind: ActivationKind | None,
    per_token: int = 1,
    interleaved: bool = False,
) -> None:
    assert weight.data.is_contiguous() and weight.row_block == 1
    x = x.contiguous()
    (rows, outputs), inputs = out.shape, x.shape[1]
    rows_PM, expert_P = (None, None) if places is None else places
    blocks = triton.cdiv(rows, tile.tokens) if expert_P is None else len(expert_P)
    group = weight.column_block if weight.column_block < inputs else 0
    # A tile holds whole groups or is part of one.
    depth = max(32, min(tile.depth, 1 << (inputs - 1).bit_length()))
    depth = depth if x.dtype.itemsize < 4 else min(depth, 64)
    with device_guard(x):
        _gemm_kernel[(blocks * triton.cdiv(outputs, tile.rows),)](
            x,
            weight.data,
            kernel_scale(weight),
            weight.zero,
            weight.global_scale,
            bias,
            out,
            rows_PM,
            expert_P,
            rows,
            inputs,
            outputs,
            weight.scale.shape[-1],
            blocks,
            PER_TOKEN=per_token,
            ELEMENT=weight.format.element,
            SCALE=weight.format.scale,
            ZERO=weight.zero is not None,
            GLOBAL=weight.global_scale is not None,
            BIAS=bias is not None,
            EXPERTS=expert_P is not None,
            ACTIVATION=kind or "",
            INTERLEAVED=interleaved,
            GROUP=group,
            EVEN_K=inputs % depth == 0,
            N=tile.rows,
            T=tile.tokens,
            K=depth,
            BLOCKS_TOGETHER=_GROUP,
            num_warps=tile.warps,
            num_stages=_count_stages(tile, weight),
            **pdl_options(x.device),
        )


def _count_stages(tile: WeightOnlyTile, weight: QuantizedTensor) -> int:
    """Pipeline stages. On ROCm rows that are split into even and odd columns are not pipelined: Triton 3.6 fails to."""
    return 1 if torch.version.hip is not None and weight.format.bits == 4 else tile.stages


# Specializing on the number of rows would compile kernels in the middle of a step.
_jit_any_rows: Any = triton.jit(do_not_specialize=["rows", "blocks"]) if HAVE_TRITON else jit


@_jit_any_rows
def _gemm_kernel(
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor,
    global_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    expert_ptr: tl.tensor,
    rows: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    groups: tl.tensor,
    blocks: tl.tensor,
    PER_TOKEN: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALE: tl.constexpr,
    ZERO: tl.constexpr,
    GLOBAL: tl.constexpr,
    BIAS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN_K: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    BLOCKS_TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        # A trainer's weights may be written by the previous launch: nothing is read early.
        gdc_launch_dependents()
        gdc_wait()
    block, column = _tile_index(tl.program_id(0), blocks, tl.cdiv(outputs, N), BLOCKS_TOGETHER)
    row_T = block * T + tl.arange(0, T)
    expert = tl.full((), 0, tl.int64)
    if EXPERTS:
        expert = tl.load(expert_ptr + block).to(tl.int64)
        if expert < 0:
            return
        row_T = tl.load(rows_ptr + row_T)
    valid_T = row_T < rows
    source_T = tl.where(valid_T, row_T // PER_TOKEN, 0).to(tl.int64)
    n_N = column * N + tl.arange(0, N)
    valid_N = n_N < outputs
    gate_N = expert * (outputs if ACTIVATION == "" else 2 * outputs) + (2 * n_N if INTERLEAVED else n_N)
    up_N = gate_N + (1 if INTERLEAVED else outputs)
    dtype: tl.constexpr = x_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    k_K = tl.arange(0, K)
    x_TK = x_ptr + source_T[:, None] * inputs + k_K[None, :]
    sum_NT = tl.zeros((N, T), tl.float32)
    up_NT = tl.zeros((N, T), tl.float32)
    factor = tl.load(global_ptr + expert) if GLOBAL else 1.0
    tensors = (data_ptr, scale_ptr, zero_ptr, factor)
    for start in range(0, inputs, K):  # pyright: ignore[reportArgumentType]
        valid_TK = valid_T[:, None] if EVEN_K else valid_T[:, None] & (start + k_K < inputs)[None, :]
        b_TK = tl.load(x_TK + start, valid_TK, other=0.0)
        even_TC, odd_TC = b_TK, b_TK
        if ELEMENT != "int8":
            even_TC, odd_TC = tl.split(tl.reshape(b_TK, (T, K // 2, 2)))
        pairs = load_weight_pairs(
            *tensors, gate_N, valid_N, start, inputs, groups, ELEMENT, SCALE, ZERO, GLOBAL, GROUP, dtype, N, K
        )
        sum_NT = _dot_pairs(sum_NT, pairs[0], pairs[1], even_TC, odd_TC, ELEMENT)
        if ACTIVATION != "":
            pairs = load_weight_pairs(
                *tensors, up_N, valid_N, start, inputs, groups, ELEMENT, SCALE, ZERO, GLOBAL, GROUP, dtype, N, K
            )
            up_NT = _dot_pairs(up_NT, pairs[0], pairs[1], even_TC, odd_TC, ELEMENT)
    out_dtype = out_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    out_NT = _round_with_bias(sum_NT, bias_ptr, gate_N, valid_N, out_dtype, BIAS)
    if ACTIVATION != "":
        up_NT = _round_with_bias(up_NT, bias_ptr, up_N, valid_N, out_dtype, BIAS)
        out_NT = activate_and_multiply(out_NT, up_NT, ACTIVATION, True).to(out_dtype)
    at_TN = out_ptr + row_T.to(tl.int64)[:, None] * outputs + n_N[None, :]
    tl.store(at_TN, tl.trans(out_NT), valid_T[:, None] & valid_N[None, :])


@jit
def _dot_pairs(
    sum_NT: tl.tensor,
    low_NC: tl.tensor,
    high_NC: tl.tensor,
    even_TC: tl.tensor,
    odd_TC: tl.tensor,
    ELEMENT: tl.constexpr,
) -> Any:
    """Add the products of the even and of the odd columns; INT8 has all columns in the first."""
    sum_NT = tl.dot(low_NC, tl.trans(even_TC), sum_NT, input_precision="ieee")
    if ELEMENT != "int8":
        sum_NT = tl.dot(high_NC, tl.trans(odd_TC), sum_NT, input_precision="ieee")
    return sum_NT


@jit
def _round_with_bias(
    sum_NT: tl.tensor,
    bias_ptr: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    OUT_DTYPE: tl.dtype,
    BIAS: tl.constexpr,
) -> tl.tensor:
    if BIAS:
        sum_NT += tl.load(bias_ptr + row_N, valid_N, other=0.0).to(tl.float32)[:, None]
    return sum_NT.to(OUT_DTYPE)


@jit
def _tile_index(tile: tl.tensor, blocks: tl.tensor, columns: tl.tensor, TOGETHER: tl.constexpr) -> Any:
    """Tile order such that tiles running at the same time share rows and weights."""
    tiles_per_group = TOGETHER * columns
    first_block = (tile // tiles_per_group) * TOGETHER
    group_rows = tl.minimum(blocks - first_block, TOGETHER)
    return first_block + (tile % tiles_per_group) % group_rows, (tile % tiles_per_group) // group_rows
