"""A micro-batch whose tokens are cut over the context ranks: queries stay, keys and values are gathered.

    stretch  |0|1|2|3|4|5|6|7|      with 4 ranks; rank 0 has pieces 0 and 7, rank 1 has 1 and 6, ...

Late pieces see much and early ones little, so that every rank has as much to do.

Shapes: T tokens of the whole micro-batch, t of this rank, padding included, as many on every rank; M = world * t keys
of all ranks; R trained tokens, r those that this rank predicts; H query heads, G key-value heads, d channels of a key,
e of a value; L layers with experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.collective import Ring, rows_gathered, rows_joined
from miles.kernels.arithmetic import exact
from miles.kernels.exact.packed import ExactSegmentAttend
from miles.kernels.segments import Runs, Segment, SegmentAttend
from miles.kernels.terms import Index, Terms
from miles.kernels.varlen import PackedCarry
from miles.train.prefix import Stretch


class Laid(Protocol):
    """Packed tokens, as ``train.rows.Rows`` has them."""

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def stretches(self) -> Sequence[Stretch]: ...

    @property
    def tokens_T(self) -> Tensor: ...

    @property
    def positions_T(self) -> Tensor: ...

    @property
    def before_R(self) -> Tensor: ...

    @property
    def replay_TLk(self) -> Tensor | None: ...


class ContextAttend:
    """An ``Attend`` of one rank's queries over the keys and values of all ranks."""

    latent = False

    def __init__(self, segments: Sequence[Segment], own: int, ring: Ring, device: torch.device) -> None:
        self._ring = ring
        kind = ExactSegmentAttend if exact() else SegmentAttend
        self._attend = kind(segments, device, keys=ring.world * own)

    def __call__(
        self,
        layer: int,
        q_tHd: Tensor,
        k_tGd: Tensor,
        v_tGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        # One message for both: a key's channels beside its value's.
        both_MGx = rows_gathered(torch.cat((k_tGd, v_tGe), -1), self._ring)
        k_MGd, v_MGe = both_MGx.split((k_tGd.shape[-1], v_tGe.shape[-1]), dim=-1)
        return self._attend(layer, q_tHd, k_MGd, v_MGe, terms, sinks_H=sinks_H, index=index)

    def carry(self, layer: int) -> PackedCarry:
        return self._attend.carry(layer)


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTokens:
    """``train.logits.Tokens`` of one rank: ``where_R`` says where each trained token is among what ranks send, of
    which each sends ``most`` rows."""

    mine_r: Tensor
    where_R: Tensor
    most: int
    ring: Ring

    def join(self, x_r: Tensor) -> Tensor:
        missing = self.most - len(x_r)
        sent = F.pad(x_r, (*(0, 0) * (x_r.ndim - 1), 0, missing)) if missing else x_r
        return rows_joined(sent, self.ring).index_select(0, self.where_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What one rank reads of a micro-batch. ``before_r`` are the rows of its hidden states that predict the trained
    tokens ``tokens.mine_r``; the last ``fill`` tokens only fill up."""

    tokens_t: Tensor
    positions_t: Tensor
    attend: ContextAttend
    before_r: Tensor
    tokens: CutTokens
    replay_tLk: Tensor | None
    fill: int = 0


@dataclass(frozen=True, slots=True)
class _Deal:
    """Who has which tokens: ``own`` of each rank in its order, each token's place among all ranks' ``size`` places,
    and where the pieces of each stretch lie among these."""

    own: list[NDArray[np.int64]]
    size: int
    place_T: NDArray[np.int64]
    pieces: list[Runs]


def _owner(piece: int, world: int) -> int:
    return min(piece, 2 * world - 1 - piece)


def _deal(lengths: Sequence[int], world: int, multiple: int) -> _Deal:
    """Every stretch in 2 * world pieces, there and back again."""
    own: list[list[NDArray[np.int64]]] = [[] for _ in range(world)]
    used = [0] * world
    found: list[list[tuple[int, int, int]]] = []
    start = 0
    for number, length in enumerate(lengths):
        # Who gets what is left over goes round with the stretches.
        bounds = [(length * j + number % (2 * world)) // (2 * world) for j in range(2 * world + 1)]
        placed: list[tuple[int, int, int]] = []
        for piece, (lo, hi) in enumerate(pairwise(bounds)):
            rank = _owner(piece, world)
            own[rank].append(np.arange(start + lo, start + hi))
            placed.append((rank, used[rank], hi - lo))
            used[rank] += hi - lo
        found.append(placed)
        start += length
    size = max(1, -(-max(used) // multiple)) * multiple
    place_T = np.empty(start, np.int64)
    joined = [np.concatenate(each) for each in own]
    for rank, tokens in enumerate(joined):
        place_T[tokens] = rank * size + np.arange(len(tokens))
    return _Deal(joined, size, place_T, [tuple((r * size + at, n) for r, at, n in each) for each in found])


def _segments(stretches: Sequence[Stretch], deal: _Deal, rank: int, world: int) -> list[Segment]:
    """This rank's queries in the order it has them, padding last, which sees nothing but itself."""
    pasts: list[Runs] = []
    out: list[Segment] = []
    for stretch, pieces in zip(stretches, deal.pieces, strict=True):
        past = () if stretch.after is None else pasts[stretch.after]
        pasts.append((*past, *pieces))
        for piece in (rank, 2 * world - 1 - rank):
            out.append(Segment(pieces[piece][1], (*past, *pieces[: piece + 1])))
    used = len(deal.own[rank])
    return [*out, Segment(deal.size - used, ((rank * deal.size + used, deal.size - used),))]


def cut(rows: Laid, ring: Ring, *, multiple: int = 1) -> Cut:
    """This rank's share of ``rows``; every rank's is as long, a ``multiple`` of so many tokens, and padded behind.

    The rows are the same on all ranks of the ring, and all of them cut at once.
    """
    stretches = rows.stretches or tuple(Stretch(length) for length in rows.lengths)
    device, world, rank = rows.tokens_T.device, ring.world, ring.rank
    deal = _deal([s.length for s in stretches], world, multiple)
    own_t = torch.from_numpy(deal.own[rank]).to(device)
    more = deal.size - len(own_t)
    place_R = torch.from_numpy(deal.place_T).to(device)[rows.before_R]
    owner_R = place_R // deal.size
    mine_r = (owner_R == rank).nonzero()[:, 0]
    replay_tLk = None
    if rows.replay_TLk is not None:
        replay_tLk = F.pad(rows.replay_TLk.index_select(0, own_t), (0, 0, 0, 0, 0, more), value=-1)
    return Cut(
        tokens_t=F.pad(rows.tokens_T.index_select(0, own_t), (0, more)),
        positions_t=F.pad(rows.positions_T.index_select(0, own_t), (0, more)),
        attend=ContextAttend(_segments(stretches, deal, rank, world), deal.size, ring, device),
        before_r=place_R[mine_r] - rank * deal.size,
        tokens=_tokens(owner_R, mine_r, ring),
        replay_tLk=replay_tLk,
        fill=more,
    )


def _tokens(owner_R: Tensor, mine_r: Tensor, ring: Ring) -> CutTokens:
    number = owner_R.bincount(minlength=ring.world)
    most = int(number.max())
    by_owner_R = owner_R.argsort(stable=True)
    among_R = torch.empty_like(by_owner_R)
    among_R[by_owner_R] = torch.arange(len(owner_R), device=owner_R.device)
    first = number.cumsum(0) - number
    return CutTokens(mine_r=mine_r, where_R=owner_R * most + among_R - first[owner_R], most=most, ring=ring)
