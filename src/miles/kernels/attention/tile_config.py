"""Compile-time configuration and tile sizes of the paged attention kernels.

Shapes: H query heads, G key-value heads, d channels of a key, e of a value, M queries and N tokens of a tile.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.fused.kv_cache_fp8 import has_native_e4m3


class TileTuning(NamedTuple):
    """Tokens of a tile, warps and pipeline stages of a program, resident programs per SM.

    A token's slot is loaded before the token itself: one more tile in flight takes two more stages.
    """

    tokens: int
    warps: int
    stages: int
    resident: int = 1


class PrefillTile(NamedTuple):
    """Queries of a prefill tile and its tuning."""

    queries: int
    tuning: TileTuning


# The most channels of a head, other than of MLA, in half precision and in float32.
MAX_HEAD_DIM, MAX_FP32_HEAD_DIM = 512, 256
# Half precision, by head dim (64, 128, 256, 512) and queries of a tile.
DECODE_TUNINGS: dict[tuple[int, int], TileTuning] = {
    (64, 16): TileTuning(64, 2, 3, 4),
    (64, 32): TileTuning(128, 4, 5, 3),
    (64, 64): TileTuning(128, 4, 5, 2),
    (128, 16): TileTuning(64, 2, 3, 4),
    (128, 32): TileTuning(64, 4, 5, 2),
    (128, 64): TileTuning(64, 4, 5, 2),
    (256, 16): TileTuning(32, 4, 5, 2),
    (256, 32): TileTuning(32, 4, 5, 2),
    (256, 64): TileTuning(32, 8, 5, 1),
    (512, 16): TileTuning(32, 4, 3, 1),
    (512, 32): TileTuning(32, 8, 3, 1),
    (512, 64): TileTuning(32, 8, 3, 1),
}
PREFILL_TILES: dict[int, PrefillTile] = {
    64: PrefillTile(128, TileTuning(128, 8, 5)),
    128: PrefillTile(128, TileTuning(128, 8, 3)),
    256: PrefillTile(128, TileTuning(64, 8, 3)),
    512: PrefillTile(64, TileTuning(32, 8, 3)),
}
# MLA (values of 512 channels, keys of 576), decode by queries of a tile.
MLA_DECODE_TUNINGS: dict[int, TileTuning] = {
    16: TileTuning(32, 4, 5, 2),
    32: TileTuning(32, 8, 5, 1),
    64: TileTuning(64, 8, 3, 1),
}
MLA_PREFILL_TILE = PrefillTile(64, TileTuning(64, 8, 3))
# Half precision over an FP8 KV cache. Scales are loaded best if a tile has at least half as many tokens as threads.
FP8_DECODE_TUNINGS: dict[tuple[int, int], TileTuning] = {
    (64, 16): TileTuning(128, 4, 5, 3),
    (64, 32): TileTuning(128, 4, 5, 3),
    (64, 64): TileTuning(128, 4, 5, 2),
    (128, 16): TileTuning(128, 4, 5, 2),
    (128, 32): TileTuning(128, 4, 5, 2),
    (128, 64): TileTuning(64, 4, 5, 2),
    (256, 16): TileTuning(64, 4, 5, 2),
    (256, 32): TileTuning(64, 4, 5, 2),
    (256, 64): TileTuning(64, 8, 3, 1),
    (512, 16): TileTuning(32, 4, 3, 1),
    (512, 32): TileTuning(32, 8, 3, 1),
    (512, 64): TileTuning(32, 8, 3, 1),
}
FP8_PREFILL_TILES: dict[int, PrefillTile] = {
    64: PrefillTile(128, TileTuning(128, 8, 5)),
    128: PrefillTile(128, TileTuning(128, 8, 3)),
    256: PrefillTile(128, TileTuning(64, 8, 3)),
    512: PrefillTile(32, TileTuning(32, 8, 3)),
}
FP8_MLA_DECODE_TUNINGS: dict[int, TileTuning] = {
    16: TileTuning(64, 4, 3, 2),
    32: TileTuning(64, 4, 3, 4),
    64: TileTuning(64, 8, 3, 1),
}
# Tiles of 64 queries need more registers than there are, since they convert the latent for shared memory: heads are
# split into tiles of at most so many, and only shared prefixes may have more.
FP8_MLA_MAX_QUERIES = 32
FP8_MLA_PREFILL_TILE = PrefillTile(32, TileTuning(64, 4, 4))
# Float32, which is multiplied without tensor cores.
FP32_DECODE_TUNINGS: dict[int, TileTuning] = {
    16: TileTuning(32, 8, 3, 2),
    32: TileTuning(32, 8, 3, 1),
    64: TileTuning(16, 8, 3, 1),
}
FP32_PREFILL_TILE = PrefillTile(16, TileTuning(16, 8, 3))
FP32_MLA_DECODE_TUNINGS: dict[int, TileTuning] = {
    16: TileTuning(16, 8, 3, 1),
    32: TileTuning(16, 8, 2, 1),
    64: TileTuning(16, 16, 2, 1),
}

# On ROCm the queries of a tile are in LDS, of which a compute unit of MI300 has 64 KiB: half of it at most for them.
ROCM_QUERY_BYTES = 32 * 1024
# Channels of a head from which on decode tiles on ROCm have no more than so many queries.
ROCM_WIDE_HEAD, ROCM_WIDE_QUERIES = 256, 32

# Splits of a row that the reduction kernel reads at once, and channels one of its programs reduces.
REDUCED_SPLITS = 8
REDUCED_CHANNELS = 512


class KernelConfig(NamedTuple):
    """Compile-time constants of an attention kernel (``CFG`` in the Triton sources).

    G key-value heads of r query heads, at most R of them in a tile; d, e, x channels of keys, of values, of keys beyond
    the values' (D, E, X: padded to a tile); strides of a token in the cache; 0 stands for no ``window``, no ``chunk``.
    ``latent`` (MLA): values are the first channels of the keys. ``fp8``: keys and values are E4M3 bytes with scales,
    which the GPU converts itself if ``native_fp8``. ``fp16_dots``: they are multiplied as float16, and their scales
    applied to scores and weights; batch-invariant kernels do not use it. ``paired``: two channels are loaded as one.
    ``scale_copies``: how often each scale is loaded. ``has_visible_ends``: tokens may attend beyond their own position.
    """

    G: int
    r: int
    R: int
    d: int
    e: int
    x: int
    D: int
    E: int
    X: int
    M: int
    N: int
    k_stride: int
    v_stride: int
    page_size: int
    window: int
    chunk: int
    has_softcap: bool
    has_sinks: bool
    latent: bool
    fp8: bool = False
    native_fp8: bool = False
    fp16_dots: bool = False
    paired: bool = False
    scale_copies: int = 1
    has_visible_ends: bool = False

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.G * self.r

    @property
    def head_tiles(self) -> int:
        """Tiles per key-value head that its query heads are split into."""
        return -(-self.r // self.R)

    @property
    def is_windowed(self) -> bool:
        """Whether a window or chunk may hide earlier tokens."""
        return self.window + self.chunk > 0


def build_kernel_config(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, params: PagedAttentionParams, *, latent: bool = False
) -> KernelConfig:
    """The configuration for these tensors, tile sizes M and N still unset."""
    _, heads, width = q_THd.shape
    _, groups, keys = k_SGd.shape
    _, _, values = v_SGe.shape
    assert heads % groups == 0, "query heads must be a multiple of key-value heads"
    assert width == keys and q_THd.stride()[1:] == (keys, 1), "the heads of a query must be contiguous"
    assert k_SGd.stride()[1:] == (keys, 1), "the keys of a token must be contiguous"
    assert latent or v_SGe.stride()[1:] == (values, 1), "the values of a token must be contiguous"
    assert (params.kv_scales is None) == (k_SGd.dtype != torch.uint8), "FP8 keys and values need their scales"
    shape, strides = (heads, groups, keys, values), (k_SGd.stride(0), v_SGe.stride(0))
    return _build_shape_config(shape, strides, latent)._replace(
        page_size=params.page_size,
        window=params.window or 0,
        chunk=params.chunk or 0,
        has_softcap=params.softcap is not None,
        has_sinks=params.sinks_H is not None,
        fp8=params.kv_scales is not None,
        native_fp8=params.kv_scales is not None and has_native_e4m3(q_THd.device),
        fp16_dots=params.kv_scales is not None and q_THd.dtype in (torch.bfloat16, torch.float16),
    )


@cache
def _build_shape_config(shape: tuple[int, int, int, int], strides: tuple[int, int], latent: bool) -> KernelConfig:
    heads, groups, keys, values = shape
    main = values if latent else keys
    return KernelConfig(
        G=groups,
        r=heads // groups,
        R=heads // groups,
        d=main,
        e=values,
        x=keys - main,
        D=pad_dim(main),
        E=pad_dim(values),
        X=pad_dim(keys - main) if keys > main else 0,
        M=0,
        N=0,
        k_stride=strides[0],
        v_stride=strides[1],
        page_size=0,
        window=0,
        chunk=0,
        has_softcap=False,
        has_sinks=False,
        latent=latent,
    )


def select_decode_tunings(config: KernelConfig, dtype: torch.dtype, device: torch.device) -> dict[int, TileTuning]:
    """Tunings of decode kernels, by queries of a tile."""
    if dtype == torch.float32:
        table = FP32_MLA_DECODE_TUNINGS if config.latent else FP32_DECODE_TUNINGS
    elif config.latent:
        table = FP8_MLA_DECODE_TUNINGS if config.fp8 else MLA_DECODE_TUNINGS
    else:
        tunings = FP8_DECODE_TUNINGS if config.fp8 else DECODE_TUNINGS
        table = {queries: tunings[_table_width(config), queries] for queries in (16, 32, 64)}
    return {queries: _fit_to_device(tuning, config, device) for queries, tuning in table.items()}


def max_decode_queries(config: KernelConfig, tunings: dict[int, TileTuning]) -> int:
    """The most query heads of a row in a tile."""
    if config.latent:
        return FP8_MLA_MAX_QUERIES if config.fp16_dots else max(tunings)
    return min(max(tunings), max_prefix_queries(max(config.d, config.e)))


def max_prefix_queries(head_dim: int) -> int:
    """The most queries of a decode tile: on ROCm 64 of a wide head would not fit the LDS together with their scores."""
    return ROCM_WIDE_QUERIES if torch.version.hip is not None and head_dim > ROCM_WIDE_HEAD else 64


def select_prefill_tile(config: KernelConfig, dtype: torch.dtype, device: torch.device) -> PrefillTile:
    """The tile of prefill kernels."""
    if dtype == torch.float32:
        tile = FP32_PREFILL_TILE
    elif config.latent:
        tile = FP8_MLA_PREFILL_TILE if config.fp8 else MLA_PREFILL_TILE
    else:
        tile = (FP8_PREFILL_TILES if config.fp8 else PREFILL_TILES)[_table_width(config)]
    queries = tile.queries
    if torch.version.hip is not None and dtype != torch.float32:
        queries = min(queries, max(16, ROCM_QUERY_BYTES // (2 * config.D)))
    return PrefillTile(queries, _fit_to_device(tile.tuning, config, device))


def set_tile(config: KernelConfig, queries: int, tuning: TileTuning) -> KernelConfig:
    """The configuration with tile sizes set.

    Tensor cores take tiles of fewer than 64 queries from registers, where FP8 channels must be in pairs (see
    ``tiles_triton``); keys and values of larger tiles are converted on their way to shared memory.
    """
    even = (config.d | config.e | config.k_stride | config.v_stride) % 2 == 0
    paired = config.fp16_dots and queries < 64 and min(config.D, config.E) >= 32 and even
    copies = max(1, 16 * tuning.warps // tuning.tokens) if config.fp16_dots else 1
    return config._replace(M=queries, N=tuning.tokens, paired=paired, scale_copies=copies)


def _fit_to_device(tuning: TileTuning, config: KernelConfig, device: torch.device) -> TileTuning:
    """On ROCm a compute unit has 64 KiB of LDS, and loads are pipelined one stage ahead through registers.

    Tensor cores of Blackwell take both operands from shared memory, where the latent of MLA would not fit as often.
    """
    if torch.version.hip is None:
        is_blackwell = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 10
        fits = not (is_blackwell and config.latent and not config.fp8)
        return tuning if fits else tuning._replace(tokens=min(tuning.tokens, 32), stages=2)
    return tuning._replace(tokens=min(tuning.tokens, 64 if max(config.D, config.E) <= 128 else 32), stages=2)


def _table_width(config: KernelConfig) -> int:
    assert max(config.D, config.E) <= MAX_HEAD_DIM, f"head dims over {MAX_HEAD_DIM} are supported for MLA only"
    return max(config.D, config.E, 64)


def scale_tensors(params: PagedAttentionParams, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Scales of an FP8 KV cache as kernel arguments; without one, any tensor, which is not read."""
    return (unused, unused) if params.kv_scales is None else params.kv_scales


def pad_dim(value: int) -> int:
    """The next power of two that ``tl.dot`` accepts as a dimension: at least 16."""
    return max(16, 1 << (value - 1).bit_length())
