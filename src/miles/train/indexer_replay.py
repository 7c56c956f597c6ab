"""Indexer replay in training: the engine's selections of sparse attention in place of a model's own, and their counts.

Shapes: T packed input tokens, L layers with an indexer of their own, k entries of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from miles.core.errors import MilesError
from miles.kernels.attention.indexer_replay import GroupShard, IndexerSelections
from miles.models.indexer_layout import build_indexer_layout
from miles.models.parallel.tp_sharding import ShardSegment
from miles.models.spec import DecoderSpec


class IndexerCounts(NamedTuple):
    """Replayed entries that the model's own indexers would not have selected, and all replayed ones."""

    mismatches: Tensor
    replayed: Tensor


def build_selections(
    spec: DecoderSpec, indexer_TLk: Tensor | None, *, tp_rank: int = 0, tp_size: int = 1
) -> IndexerSelections | None:
    """Build the selections of a forward that replays ``indexer_TLk``, on one of ``tp_size`` tensor-parallel ranks.

    None if it replays nothing; MilesError if the entries are those of another model.
    """
    if indexer_TLk is None:
        return None
    layout = build_indexer_layout(spec)
    layers, entries = (0, 0) if layout is None else (len(layout.layers), layout.groups * layout.count)
    if layout is None or indexer_TLk.shape[1:] != (layers, entries):
        raise MilesError(
            f"the engine recorded {indexer_TLk.shape[2]} selected entries per token in {indexer_TLk.shape[1]} layers, "
            f"but the model in training selects {entries} in {layers}: use the same model in both."
        )
    shard = None if layout.groups == 1 or tp_size == 1 else _build_shard(layout.groups, tp_rank, tp_size)
    return IndexerSelections(layers=layout.layers, shard=shard, replay_TLk=indexer_TLk)


def _build_shard(groups: int, rank: int, world: int) -> GroupShard:
    """Return the key-value heads of a rank; with more ranks than heads neighbouring ranks have the same."""
    heads = ShardSegment(groups, repeat=True)
    first, stop = heads.bounds(rank, world)
    is_counted = rank == 0 or heads.bounds(rank - 1, world) != (first, stop)
    return GroupShard(first=first, stop=stop, groups=groups, is_counted=is_counted)


def collect_counts(
    selections: IndexerSelections | None,
    device: torch.device,
    all_reduce: Callable[[Tensor], Tensor] | None = None,
    sum_groups: Callable[[Tensor], Tensor] | None = None,
) -> IndexerCounts | None:
    """Return the counts of a forward; MilesError if recorded entries cannot be selections of their tokens.

    ``all_reduce`` sums over ranks that share the tokens, ``sum_groups`` over those that have other key-value heads.
    """
    if selections is None:
        return None
    counts = selections.count(device)
    if sum_groups is not None and selections.shard is not None:
        counts = sum_groups(counts)
    mismatches, replayed, invalid = (counts if all_reduce is None else all_reduce(counts)).unbind()
    if int(invalid):
        raise MilesError(
            f"the recorded indexer_topk of {int(invalid)} tokens are not ascending positions before the token; custom "
            "generate functions must keep the extras of spans with their tokens."
        )
    return IndexerCounts(mismatches, replayed)
