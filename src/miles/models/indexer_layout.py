"""Layout of recorded indexer selections: which layers of sparse attention select, and how many entries a token has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from miles.core.errors import UsageError
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlaSpec, PoolIndexerSpec

if TYPE_CHECKING:
    from miles.core.types import Array

_MAX_UINT16 = 65_535


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerLayout:
    """``layers`` have an indexer of their own; each selects ``count`` units for each of ``groups`` key-value heads.

    A unit is a token, or a pool or block of tokens. DSA indexers have one group, since all heads attend alike. A
    position is stored in ``dtype``, whose maximum means "not recorded".
    """

    layers: tuple[int, ...]
    count: int
    groups: int
    dtype: Literal["uint16", "uint32"]

    def unrecorded_row(self) -> Array:
        """Return the entries [L, k] of a token that was not recorded."""
        import numpy as np  # flags are checked without it

        shape = (len(self.layers), self.groups * self.count)
        return np.full(shape, np.iinfo(self.dtype).max, self.dtype)


def build_indexer_layout(spec: DecoderSpec) -> IndexerLayout | None:
    """Return the layout of a model's selections; None if no layer has an indexer.

    UsageError if its layers select different numbers, which one array does not hold.
    """
    found = {i: counts for i, layer in enumerate(spec.layers) if (counts := _count_entries(layer)) is not None}
    if not found:
        return None
    counts = set(found.values())
    if len(counts) > 1:
        raise UsageError(
            f"--use-rollout-indexer-replay needs indexers that select alike, but those of {spec.family} select "
            f"{' and '.join(str(groups * count) for groups, count in sorted(counts))} entries; remove it."
        )
    ((groups, count),) = counts
    dtype = "uint16" if spec.max_positions <= _MAX_UINT16 else "uint32"
    return IndexerLayout(layers=tuple(found), count=count, groups=groups, dtype=dtype)


def _count_entries(layer: LayerSpec) -> tuple[int, int] | None:
    """Return the groups and units that a layer's own indexer selects; None if it has none."""
    match layer.mixer:
        case MlaSpec(indexer=index) if index is not None and index.source is None:
            return 1, index.top // index.pool
        case AttentionSpec(indexer=PoolIndexerSpec() as pools):
            return 1, pools.top // pools.pool
        case AttentionSpec(indexer=blocks, num_kv_heads=groups) if blocks is not None:
            return groups, blocks.top
        case _:
            return None
