"""Tile sizes and compile-time configuration of the batch-invariant attention kernels.

Shapes: H query heads, G key-value heads, d channels of a key, e of a value.

The key block is part of the arithmetic: one size for every kernel of a dtype. Everything else here changes speed and no
bits, as long as half-precision matmuls use one kind of MMA instruction: at least 64 rows for four warps.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from miles.kernels.attention.tile_config import KernelConfig, PagedAttentionParams, build_kernel_config, pad_dim

LOG2E = 1.4426950408889634
# Keys of a block.
BLOCK, FP32_BLOCK = 64, 32


class InvariantPrefillTile(NamedTuple):
    """Queries of a tile, warps and stages of a program, and the most value channels of one program."""

    queries: int
    warps: int
    stages: int
    channels: int = 128


class InvariantDecodeTuning(NamedTuple):
    """Warps and stages of a program, resident programs per SM, and the register limit that makes room for them."""

    warps: int
    stages: int
    resident: int
    registers: int | None = None


# Half precision, by channels of a key (64, 128, 256).
PREFILL_TILES: dict[int, InvariantPrefillTile] = {
    64: InvariantPrefillTile(128, 8, 3),
    128: InvariantPrefillTile(128, 8, 3),
    256: InvariantPrefillTile(64, 4, 2),
}
# A token's slot is loaded before the token itself: one more block in flight takes two more stages.
PAGED_PREFILL_TILES: dict[int, InvariantPrefillTile] = {
    64: InvariantPrefillTile(128, 8, 5),
    128: InvariantPrefillTile(128, 8, 5),
    256: InvariantPrefillTile(64, 4, 3),
}
FP32_PREFILL_TILE = InvariantPrefillTile(16, 8, 2)
# By channels of a key and queries of a tile.
DECODE_TUNINGS: dict[tuple[int, int], InvariantDecodeTuning] = {
    (64, 16): InvariantDecodeTuning(4, 4, 4, 128),
    (64, 32): InvariantDecodeTuning(4, 4, 3),
    (64, 64): InvariantDecodeTuning(4, 4, 2),
    (128, 16): InvariantDecodeTuning(4, 4, 3, 168),
    (128, 32): InvariantDecodeTuning(4, 5, 2),
    (128, 64): InvariantDecodeTuning(4, 3, 2),
    (256, 16): InvariantDecodeTuning(4, 3, 1),
    (256, 32): InvariantDecodeTuning(4, 3, 1),
    (256, 64): InvariantDecodeTuning(4, 3, 1),
}
FP32_DECODE_TUNING = InvariantDecodeTuning(8, 2, 1)


class BackwardTile(NamedTuple):
    """Queries and keys of a tile, warps and stages of a program, programs that share the gradient channels."""

    queries: int
    keys: int
    warps: int
    stages: int
    parts: int = 1


# By the most channels of a key or a value: the dK/dV kernel, and the dQ kernel.
DKV_TILES: dict[int, BackwardTile] = {
    64: BackwardTile(64, 128, 8, 3),
    128: BackwardTile(64, 128, 8, 3),
    256: BackwardTile(64, 64, 4, 1, 2),
}
DQ_TILES: dict[int, BackwardTile] = {
    64: BackwardTile(128, 64, 8, 3),
    128: BackwardTile(128, 64, 8, 3),
    256: BackwardTile(64, 64, 4, 1),
}
FP32_BACKWARD_TILE = BackwardTile(16, 32, 8, 1)


_Tile = TypeVar("_Tile", InvariantPrefillTile, InvariantDecodeTuning, BackwardTile)


class SoftmaxConstants(NamedTuple):
    """The factor from score to exponent of two, the factor inside the softcap's exponential, and the softcap."""

    exp2_factor: float
    softcap_factor: float
    softcap: float


def build_softmax_constants(params: PagedAttentionParams) -> SoftmaxConstants:
    """The constants of a layer, rounded once and the same for every kernel."""
    if params.softcap is None:
        return SoftmaxConstants(params.scale * LOG2E, 0.0, 0.0)
    return SoftmaxConstants(LOG2E, 2 * LOG2E * params.scale / params.softcap, params.softcap)


def build_invariant_config(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, params: PagedAttentionParams) -> KernelConfig:
    """The kernel configuration for these tensors, tile sizes except N still unset."""
    config = build_kernel_config(q_THd, k_SGd, v_SGe, params)
    assert max(config.D, pad_dim(config.e)) <= 256, "head dims over 256 are not supported in batch-invariant mode"
    return config._replace(N=FP32_BLOCK if q_THd.dtype == torch.float32 else BLOCK)


def select_prefill_tile(config: KernelConfig, dtype: torch.dtype) -> tuple[KernelConfig, InvariantPrefillTile, int]:
    """Tile of consecutive queries, and how many programs share the value channels."""
    tuning = PAGED_PREFILL_TILES if config.page_size else PREFILL_TILES
    tile = _fit_to_device(FP32_PREFILL_TILE if dtype == torch.float32 else tuning[max(config.D, 64)], config)
    width = min(config.E, tile.channels if dtype != torch.float32 else config.E)
    return config._replace(M=tile.queries, E=width), tile, math.ceil(config.e / width)


def select_decode_tuning(
    config: KernelConfig, dtype: torch.dtype, queries: int, heads_per_tile: int
) -> tuple[KernelConfig, InvariantDecodeTuning]:
    """Tile of queries that see the same keys, ``heads_per_tile`` heads of a row in each; scores are transposed."""
    if dtype == torch.float32:
        return config._replace(M=queries, R=heads_per_tile, X=16), _fit_to_device(FP32_DECODE_TUNING, config)
    tuning = _fit_to_device(DECODE_TUNINGS[max(config.D, pad_dim(config.e), 64), queries], config)
    return config._replace(M=queries, R=heads_per_tile, X=64, E=max(config.E, 64)), tuning


def select_dkv_tile(config: KernelConfig, dtype: torch.dtype) -> tuple[KernelConfig, BackwardTile, int]:
    """Tile of the dK/dV kernel, and how many programs share its channels."""
    tile = FP32_BACKWARD_TILE if dtype == torch.float32 else DKV_TILES[max(config.D, config.E, 64)]
    tile = _fit_to_device(tile, config)
    parts = tile.parts if min(config.D, config.E) // tile.parts >= 16 else 1
    return config._replace(M=tile.queries, N=tile.keys), tile, parts


def select_dq_tile(config: KernelConfig, dtype: torch.dtype) -> tuple[KernelConfig, BackwardTile]:
    """Tile of the dQ kernel."""
    tile = FP32_BACKWARD_TILE if dtype == torch.float32 else DQ_TILES[max(config.D, config.E, 64)]
    tile = _fit_to_device(tile, config)
    return config._replace(M=tile.queries, N=tile.keys), tile


def _fit_to_device(tile: _Tile, config: KernelConfig) -> _Tile:
    """On ROCm a compute unit of MI300 has 64 KiB of LDS: no room for the next block of keys, or of half of them."""
    if torch.version.hip is None:
        return tile
    return tile._replace(stages=min(tile.stages, 2 if max(config.D, config.E) <= 128 else 1))


def pack_heads(x_THd: Tensor) -> Tensor:
    """The heads of a token contiguous; tokens may be strided."""
    return x_THd if x_THd.stride()[1:] == (x_THd.shape[2], 1) else x_THd.contiguous()
