"""Indexer replay: the selections of sparse-attention indexers, recorded by an engine and replayed by a trainer.

Shapes: T tokens of a forward, n some of them, L layers with an indexer of their own, k entries of a token, which are X
groups (key-value heads of block-sparse attention, else one) of t; G groups of this tensor-parallel rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShard:
    """The groups ``first`` to ``stop`` of ``groups``, which a tensor-parallel rank selects for.

    They are counted if no earlier rank selects for them too.
    """

    first: int
    stop: int
    groups: int
    is_counted: bool


@dataclass(slots=True, kw_only=True, eq=False)
class IndexerSelections:
    """What the indexers of one forward select; use a new object for each forward.

    An entry is the number of a token, pool or block of the token's own sequence, ascending in each group; a row of -1
    is a token that sees all tokens before it, or was not recorded. ``layers`` are those with an indexer of their own. A
    backend that computes for an engine stores what it selects in ``recorded``; one of a trainer uses ``replay_TLk`` in
    place of its own selection, which is counted in ``mismatches`` where it differs, out of ``replayed`` entries.
    ``invalid`` counts tokens whose rows cannot be selections. With a ``shard`` a rank selects for some of the groups,
    and rows have all; counts are then to be summed over the ranks.
    """

    layers: tuple[int, ...]
    shard: GroupShard | None = None
    replay_TLk: Tensor | None = None
    recorded: dict[int, Tensor] = field(default_factory=dict)
    mismatches: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    replayed: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    invalid: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def record(self, layer: int, selected_Tk: Tensor, visible_T: Tensor, max_selected: int) -> None:
        """Store what a layer selected for each token; one of at most ``max_selected`` visible tokens sees them all."""
        rows_Tk = selected_Tk.flatten(1).to(torch.int32)
        self.recorded[layer] = rows_Tk.masked_fill((visible_T <= max_selected)[:, None], -1)

    def stack_recorded(self) -> Tensor | None:
        """Return what all layers selected, [T, L, k]; None if every token saw all tokens before it."""
        if not self.recorded:
            return None
        unselective = torch.full_like(next(iter(self.recorded.values())), -1)
        return torch.stack([self.recorded.get(layer, unselective) for layer in self.layers], 1)

    def choose(self, layer: int, first: int, own_nGt: Tensor, visible_n: Tensor, *, unit: int, limit: int) -> Tensor:
        """Return what the tokens from row ``first`` on select in this layer, [n, G, t], given its own selection.

        They see ``visible_n`` tokens of their sequence, and select tokens, pools or blocks of ``unit`` tokens if these
        are more than ``limit``.
        """
        if self.replay_TLk is None:
            return own_nGt
        rows_nk = self.replay_TLk[first : first + len(own_nGt), self.layers.index(layer)]
        shard = self.shard or GroupShard(first=0, stop=own_nGt.shape[1], groups=own_nGt.shape[1], is_counted=True)
        all_nXt = rows_nk.to(own_nGt.device, torch.int64).reshape(len(own_nGt), shard.groups, own_nGt.shape[-1])
        replay_nGt = all_nXt[:, shard.first : shard.stop].contiguous()
        known_n = (all_nXt >= 0).flatten(1).any(1)
        # The last entry may be the block of the token itself, which is not complete.
        candidates_n11 = -(-visible_n // unit)[:, None, None]
        outside_nXt = (all_nXt < 0) | (all_nXt >= candidates_n11)
        unsorted_nX = (all_nXt[..., 1:] <= all_nXt[..., :-1]).any(-1)
        invalid_n = known_n & (outside_nXt.flatten(1).any(1) | unsorted_nX.any(1) | (visible_n <= limit))
        # Both are ascending, so that a search finds an equal entry.
        own_ids_nGt = own_nGt.to(torch.int64).contiguous()
        place_nGt = torch.searchsorted(own_ids_nGt, replay_nGt).clamp_(max=own_nGt.shape[-1] - 1)
        differs_nGt = own_ids_nGt.gather(-1, place_nGt) != replay_nGt
        key = layer, first
        self.invalid[key] = invalid_n.sum() * (shard.is_counted and not shard.first)
        self.mismatches[key] = (differs_nGt & known_n[:, None, None]).sum() * shard.is_counted
        self.replayed[key] = known_n.sum() * own_nGt[0].numel() * shard.is_counted
        return torch.where((known_n & ~invalid_n)[:, None, None], replay_nGt.to(own_nGt.dtype), own_nGt)

    def count(self, device: torch.device) -> Tensor:
        """Return the numbers of mismatches, replayed entries, and tokens whose rows cannot be selections."""
        parts = (list(each.values()) for each in (self.mismatches, self.replayed, self.invalid))
        none = torch.zeros((), dtype=torch.int64, device=device)
        return torch.stack([torch.stack(part).sum() if part else none for part in parts])
