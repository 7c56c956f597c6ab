"""FP8 GEMM in Triton: E4M3 rows times an E4M3 weight, scaled block by block of the inputs, in float32.

Shapes: T tokens, K in, N out; n, t and k are a tile's rows of the weight, tokens and depth; G blocks of inputs.

An output is the sum over blocks of 128 inputs, in ascending order, of the block's dot product times the scales of the
token and of the weight's row; both are applied in float32, so the limited precision of Hopper's FP8 accumulators
concerns a single block. Scales that hold for a whole row are applied at the end instead.

The weight is always the left operand of the tensor cores: its rows fill the instruction however few tokens there are,
and every tile shape uses the same instruction, so that tiles change the speed and no bits (batch invariance).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from miles.kernels.numerics import Numerics
from miles.kernels.quantized.activation_quant import has_fp8, pad_tokens
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
    use_triton,
)
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

__all__ = [
    "Fp8Tile",
    "fp8_gemm",
    "fp8_linear",
    "list_fp8_tiles",
    "select_fp8_tile",
    "supports_fp8_gemm",
]


class Fp8Tile(NamedTuple):
    """Rows of the weight and tokens of a tile, warps and pipeline stages; its depth is always 128."""

    rows: int
    tokens: int
    warps: int
    stages: int


DEPTH = 128
# Tiles by the most tokens they are for, and the relative cost of one (``benchmarks/bench_fp8_gemm.py``).
TILES: tuple[tuple[int, tuple[tuple[float, Fp8Tile], ...]], ...] = (
    (16, ((1.0, Fp8Tile(64, 16, 4, 8)), (1.6, Fp8Tile(128, 16, 4, 6)))),
    (32, ((1.0, Fp8Tile(64, 32, 4, 6)), (1.6, Fp8Tile(128, 32, 4, 5)))),
    (64, ((1.0, Fp8Tile(64, 64, 4, 6)), (1.6, Fp8Tile(128, 64, 4, 5)))),
    (128, ((1.0, Fp8Tile(64, 128, 4, 5)), (1.7, Fp8Tile(128, 128, 8, 4)))),
    (
        1 << 62,
        ((0.6, Fp8Tile(64, 128, 4, 5)), (1.0, Fp8Tile(128, 128, 8, 4)), (1.85, Fp8Tile(128, 256, 8, 3))),
    ),
)
# Tiles of tokens that are scheduled together, to share weights in the L2 cache.
_GROUP = 8
# From so many tokens on torch's scaled matmul by row is faster; by block it always is.
_MIN_LIBRARY_TOKENS = 96


def supports_fp8_gemm(x: Tensor, weight: QuantizedTensor) -> bool:
    """Whether the kernel applies: a GPU with FP8 tensor cores, or the interpreter."""
    return use_triton(x) and weight.data.dtype == torch.float8_e4m3fn and has_fp8(x.device)


def fp8_linear(x: QuantizedActivation, weight: QuantizedTensor, bias_N: Tensor | None, *, numerics: Numerics) -> Tensor:
    """``fp8_gemm``, or torch's scaled matmul where it is faster and its tiles need not be batch-invariant."""
    if not numerics.batch_invariant and _supports_scaled_mm(x, weight):
        out_TN = _scaled_mm(x, weight)
        return out_TN if bias_N is None else out_TN + bias_N
    return fp8_gemm(x, weight, bias_N)


def _supports_scaled_mm(x: QuantizedActivation, weight: QuantizedTensor) -> bool:
    """Whether cuBLAS or CUTLASS multiplies these operands: scales by row, or 1 x 128 and 128 x 128."""
    (_, inputs), outputs = x.data.shape, weight.data.shape[0]
    is_nvidia = x.data.is_cuda and torch.version.hip is None
    if not is_nvidia or x.dtype != torch.bfloat16 or inputs % 16 or outputs % 16:
        return False
    if x.columns == weight.column_block == inputs and weight.row_block == 1:
        return len(x.data) >= _MIN_LIBRARY_TOKENS
    # cuBLAS wants the number of blocks of inputs to be a multiple of four.
    return x.columns == DEPTH and weight.row_block == DEPTH and not (inputs % (4 * DEPTH) or outputs % DEPTH)


def _scaled_mm(x: QuantizedActivation, weight: QuantizedTensor) -> Tensor:
    if x.columns == x.data.shape[1]:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            x.data, weight.data.t(), x.scale, weight.scale.t(), out_dtype=x.dtype, use_fast_accum=True
        )
    functional: Any = torch.nn.functional  # newer than torch's type stubs
    (tokens, inputs), padded = x.data.shape, pad_tokens(len(x.data))
    out_TN = functional.scaled_mm(
        x.data.as_strided((padded, inputs), (inputs, 1)),
        weight.data.t(),
        x.scale.as_strided((padded, x.scale.shape[1]), (1, padded)),
        functional.ScalingType.BlockWise1x128,
        weight.scale.t(),
        functional.ScalingType.BlockWise128x128,
        output_dtype=x.dtype,
    )
    return out_TN[:tokens]


def list_fp8_tiles() -> list[Fp8Tile]:
    """Every tile that may be selected."""
    return list(dict.fromkeys(tile for _, tiles in TILES for _, tile in tiles))


def select_fp8_tile(tokens: int, rows: int, device: torch.device) -> Fp8Tile:
    """The tile that is likely the fastest: a wave of tiles takes as long as one tile."""
    tiles = next(tiles for most, tiles in TILES if tokens <= most)
    sms = count_sms(device)
    return min((-(-_count_tiles(tokens, rows, tile) // sms) * cost, tile) for cost, tile in tiles)[1]


def _count_tiles(tokens: int, rows: int, tile: Fp8Tile) -> int:
    return -(-tokens // tile.tokens) * -(-rows // tile.rows)


def fp8_gemm(
    x: QuantizedActivation, weight: QuantizedTensor, bias_N: Tensor | None = None, tile: Fp8Tile | None = None
) -> Tensor:
    """Rows times a weight [N, K], plus a bias; rounded once to the rows' dtype. ``tile`` is for benchmarks."""
    (tokens, inputs), outputs = x.data.shape, weight.data.shape[0]
    out_TN = torch.empty(tokens, outputs, dtype=x.dtype, device=x.data.device)
    if not (tokens and outputs):
        return out_TN
    tile = tile or select_fp8_tile(tokens, outputs, x.data.device)
    per_block = x.columns < inputs or weight.column_block < inputs
    assert not per_block or x.columns == weight.column_block == DEPTH, "blocks of inputs must be 128 wide"
    use_tma = _supports_tma(x.data, weight.data)
    a, b = weight.data, x.data
    if use_tma:
        a, b = _descriptor(weight.data, tile.rows), _descriptor(x.data, tile.tokens)
    with device_guard(x.data):
        _fp8_gemm_kernel[(_count_tiles(tokens, outputs, tile),)](
            a,
            b,
            weight.scale,
            x.scale,
            bias_N,
            out_TN,
            tokens,
            inputs,
            outputs,
            weight.scale.stride(0),
            x.scale.stride(0),
            x.scale.stride(1),
            ROW_BLOCK=weight.row_block,
            PER_BLOCK=per_block,
            BIAS=bias_N is not None,
            TMA=use_tma,
            EVEN_K=inputs % DEPTH == 0,
            N=tile.rows,
            T=tile.tokens,
            K=DEPTH,
            GROUP=_GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **pdl_options(x.data.device),
        )
    return out_TN


def _supports_tma(x_TK: Tensor, weight_NK: Tensor) -> bool:
    aligned = all(each % 16 == 0 for each in (x_TK.data_ptr(), weight_NK.data_ptr(), x_TK.shape[1]))
    return bool(pdl_options(x_TK.device)["PDL"]) and aligned


def _descriptor(x_RK: Tensor, rows: int) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(x_RK, [rows, DEPTH])


_jit_any_tokens: Any = triton.jit(do_not_specialize=["tokens"]) if HAVE_TRITON else jit


@_jit_any_tokens
def _fp8_gemm_kernel(
    weight: tl.tensor,
    x: tl.tensor,
    weight_scale_ptr: tl.tensor,
    x_scale_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    weight_scale_stride: tl.tensor,
    x_scale_stride_t: tl.tensor,
    x_scale_stride_g: tl.tensor,
    ROW_BLOCK: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    N: tl.constexpr,
    T: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        # A trainer's weights may be written by the previous launch: nothing is read early.
        gdc_launch_dependents()
        gdc_wait()
    row_block, token_block = _tile_index(tl.program_id(0), tl.cdiv(outputs, N), tl.cdiv(tokens, T), GROUP)
    n_n = row_block * N + tl.arange(0, N)
    t_t = token_block * T + tl.arange(0, T)
    scale_row_n = weight_scale_ptr + tl.minimum(n_n, outputs - 1) // ROW_BLOCK * weight_scale_stride
    x_scale_t = x_scale_ptr + tl.minimum(t_t, tokens - 1) * x_scale_stride_t
    sum_nt = tl.zeros((N, T), tl.float32)
    for block in range(0, tl.cdiv(inputs, K)):
        w_nk = _load_tile(weight, row_block * N, outputs, block, inputs, TMA, EVEN_K, N, K)
        x_tk = _load_tile(x, token_block * T, tokens, block, inputs, TMA, EVEN_K, T, K)
        dot_nt = tl.dot(w_nk, x_tk.T)
        if PER_BLOCK:
            scale_t = tl.load(x_scale_t + block * x_scale_stride_g)
            if ROW_BLOCK % N == 0:  # all rows of the tile share a scale
                scale_row = weight_scale_ptr + row_block * N // ROW_BLOCK * weight_scale_stride
                sum_nt += dot_nt * (tl.load(scale_row + block) * scale_t)[None, :]
            else:
                sum_nt += dot_nt * (tl.load(scale_row_n + block)[:, None] * scale_t[None, :])
        else:
            sum_nt += dot_nt
    if not PER_BLOCK:
        sum_nt *= tl.load(scale_row_n)[:, None] * tl.load(x_scale_t)[None, :]
    if BIAS:
        sum_nt += tl.load(bias_ptr + n_n, n_n < outputs, other=0.0).to(tl.float32)[:, None]
    out_tn = tl.trans(sum_nt).to(out_ptr.dtype.element_ty)  # pyright: ignore
    at_tn = out_ptr + t_t.to(tl.int64)[:, None] * outputs + n_n[None, :]
    tl.store(at_tn, out_tn, (t_t < tokens)[:, None] & (n_n < outputs)[None, :])


@jit
def _load_tile(
    matrix: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    block: tl.tensor,
    inputs: tl.tensor,
    TMA: tl.constexpr,
    EVEN_K: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
) -> Any:
    """A block of inputs of R rows; rows beyond the last are read again, or zeros, and not stored."""
    if TMA:
        return matrix.load([first, block * K])  # pyright: ignore
    else:
        k_k = block * K + tl.arange(0, K)
        row_r = tl.minimum(first + tl.arange(0, R), rows - 1)
        at_rk = matrix + row_r.to(tl.int64)[:, None] * inputs + k_k[None, :]
        if EVEN_K:
            return tl.load(at_rk)
        else:
            return tl.load(at_rk, (k_k < inputs)[None, :], other=0.0)


@jit
def _tile_index(tile: tl.tensor, row_blocks: tl.tensor, token_blocks: tl.tensor, GROUP: tl.constexpr) -> tuple:
    """Tile order such that tiles running at the same time share weights and tokens."""
    per_group = GROUP * row_blocks
    first = tile // per_group * GROUP
    count = tl.minimum(token_blocks - first, GROUP)
    return (tile % per_group) // count, first + (tile % per_group) % count
