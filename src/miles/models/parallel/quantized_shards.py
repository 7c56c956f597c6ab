"""Alignment of quantized weights with tensor-parallel shards: a rank must find the scales of the full weight. No torch.

A trainer's rank quantizes its shard by itself. The result is the shard of the quantized weight only if no block with a
scale is divided between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from miles.models.checkpoint.param_map import build_param_map
from miles.models.checkpoint.param_slices import param_shape
from miles.models.parallel.tp_sharding import compute_tp_shards, shard_spec
from miles.models.quantization import fused_segments, plan_quantization
from miles.models.spec import DecoderSpec

__all__ = ["find_divided_block"]


def find_divided_block(spec: DecoderSpec, world: int) -> str | None:
    """Return which weight has blocks that ``world`` tensor-parallel ranks would divide, as the start of a sentence."""
    if world == 1 or spec.quantization is None:
        return None
    # Blocks are those of the weight, whose shards are not those of the packed tensors.
    spec = replace(spec, quantization=replace(spec.quantization, packed=False))
    rank_spec = shard_spec(spec, world)
    full_map, rank_map = build_param_map(spec), build_param_map(rank_spec)
    shards = compute_tp_shards(spec)
    for name, quantized in plan_quantization(spec).items():
        shard, format = shards[name], quantized.format
        if not shard.segments:
            continue
        if format.global_scale:
            return f"{name} has a scale of the whole weight, of which {world} ranks would each have a part"
        full, own = param_shape(full_map[name]), param_shape(rank_map[name])
        by_rows = shard.dim == len(full) - 2
        block = format.rows if by_rows else format.columns
        size, rank_size = (full[-2], own[-2]) if by_rows else (full[-1], own[-1])
        borders = _borders(quantized.segments if by_rows else (size,), block)
        rank_borders = _borders(fused_segments(rank_map[name]) if by_rows else (rank_size,), block)
        for rank in range(world):
            if not _keeps_blocks(shard.runs(rank, world), borders, rank_borders):
                kind = "rows" if by_rows else "columns"
                return (
                    f"{name} has blocks of {'all' if block is None else block} {kind} that {world} ranks would divide"
                )
    return None


def _borders(segments: Iterable[int], block: int | None) -> frozenset[int]:
    """The first index of every block, and the end."""
    borders = {0}
    for start, stop in zip([0, *accumulate(segments)], accumulate(segments), strict=False):
        borders |= set(range(start, stop, block or stop - start)) | {stop}
    return frozenset(borders)


def _keeps_blocks(runs: Iterable[tuple[int, int, int]], borders: frozenset[int], rank_borders: frozenset[int]) -> bool:
    """Whether every run of a rank is a sequence of whole blocks, and has the same blocks there."""
    for full_start, rank_start, count in runs:
        inside = {border - full_start for border in borders if full_start <= border <= full_start + count}
        own = {border - rank_start for border in rank_borders if rank_start <= border <= rank_start + count}
        if inside != own or 0 not in inside or count not in inside:
            return False
    return True
