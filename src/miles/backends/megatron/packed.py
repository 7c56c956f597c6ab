"""A micro-batch as Megatron's layers take it: padded where ranks need equal parts, cut where they share its tokens.

A sequence is cut over context ranks into twice as many equal pieces, and a rank has one from the front and its mirror
image from the back, so that all have as much to look back on. Tokens that only fill up stand behind a sequence's own,
or are a sequence of their own: none looks at them, and nothing is learnt from them.

``_T`` tokens of the rows, ``_t`` slots of this rank, padding included; ``_R`` trained tokens and ``_r`` those this rank
predicts; ``L`` layers with experts, ``k`` experts a token, ``E`` all experts, ``G`` key-value heads.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.megatron.layout import Ring, Rings
from miles.core.errors import MilesError
from miles.kernels.segments import Segment, SegmentAttend
from miles.kernels.terms import Index, Terms
from miles.models.memory import Attend
from miles.models.rope import Positions
from miles.models.spec import DecoderSpec
from miles.train.experts import Used
from miles.train.prefix import Stretch, attend_of
from miles.train.rows import Rows

# -- routing --------------------------------------------------------------------------------


class Replay:
    """The experts to use in the slots of one rank, if any are told; counts those the router would not have chosen.

    ``used`` is filled with what was used where it is still empty, and told where it is not; ``real_t`` are the slots
    that hold a token of the rows.
    """

    def __init__(self, spec: DecoderSpec, told_tLk: Tensor | None, used: Used | None, real_t: Tensor) -> None:
        assert spec.moe is not None
        self._real_t, self._device = real_t, real_t.device
        again = None if used is None else used.experts_tLk
        self.told_tLk = told_tLk if again is None else again
        self.used = used if again is None else None
        self.counts: dict[int, Tensor] = {}
        self.chosen: dict[int, Tensor] = {}
        self._experts, self._layers = spec.moe.num_experts, len(spec.moe_layers)

    def total(self) -> Tensor:
        """Flips and replayed experts over this rank's layers and slots."""
        none = torch.zeros(2, dtype=torch.int64, device=self._device)
        return torch.stack([none, *self.counts.values()]).sum(0)

    def load(self) -> Tensor:
        """How often each expert was chosen for this rank's slots, [L, E]; nothing in layers of other stages."""
        out_LE = torch.zeros(self._layers, self._experts, dtype=torch.int64, device=self._device)
        for slot, chosen_tk in self.chosen.items():
            out_LE[slot] = torch.bincount(chosen_tk[self._real_t].flatten(), minlength=self._experts)
        return out_LE

    def remember(self) -> None:
        """Fill what is to know which experts were used."""
        if self.used is not None and self.chosen:
            some_tk = next(iter(self.chosen.values()))
            none_tk = torch.full_like(some_tk, -1)
            rows = [self.chosen.get(slot, none_tk) for slot in range(self._layers)]
            experts_tLk = torch.stack(rows, 1).to(torch.int32)
            self.used.experts_tLk = torch.where(self._real_t[:, None, None], experts_tLk, -1)


@dataclass(frozen=True, slots=True)
class Told:
    """A ``Replay`` of one layer, where Megatron's router asks whether its choice is to be another's."""

    replay: Replay
    slot: int

    def get_replay_topk(
        self,
        scores_tE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores of each token's experts and which they are; gradients flow through the scores."""
        replay, slot = self.replay, self.slot
        _, used_tk = choose(scores_tE.detach(), topk, num_groups, group_topk)
        if replay.told_tLk is not None:
            own_tk, told_tk = used_tk, replay.told_tLk[:, slot].to(used_tk.dtype)
            known_t = (told_tk >= 0).all(-1)
            used_tk = torch.where(known_t[:, None], told_tk, own_tk)
            agreed_tk = (used_tk[:, :, None] == own_tk[:, None, :]).any(-1)
            replay.counts[slot] = torch.stack((((~agreed_tk) & known_t[:, None]).sum(), known_t.sum() * topk))
        # A layer that runs a second time in backward counts once.
        replay.chosen.setdefault(slot, used_tk.detach())
        return scores_tE.gather(1, used_tk), used_tk


# -- tokens over context ranks --------------------------------------------------------------


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_r: Tensor, mine_r: Tensor, count: int, ring: Ring) -> Tensor:
        ctx.mine_r = mine_r
        out_R = x_r.new_zeros((count, *x_r.shape[1:]))
        out_R[mine_r] = x_r
        return ring.sum(out_R)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_R.index_select(0, ctx.mine_r), None, None, None


@dataclass(frozen=True, slots=True)
class Shared:
    """``train.logits.Tokens``: which trained tokens this context rank predicts."""

    mine_r: Tensor
    count: int
    ring: Ring

    def join(self, x_r: Tensor) -> Tensor:
        """What the ranks have of their tokens as one [R, ...], on each; of a gradient the own part comes back."""
        return _Join.apply(x_r, self.mine_r, self.count, self.ring)  # pyright: ignore[reportReturnType]


class GatheredAttend:
    """An ``Attend`` of this rank's queries to the keys and values of all context ranks."""

    latent = False

    def __init__(self, inner: SegmentAttend, ring: Ring) -> None:
        self._inner, self._ring = inner, ring

    def __call__(
        self,
        layer: int,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        terms: Terms,
        *,
        sinks_H: Tensor | None = None,
        index: Index | int | None = None,
    ) -> Tensor:
        both = gather_from_sequence_parallel_region(torch.cat((k_TGd, v_TGe), -1), group=self._ring.group)
        k_MGd, v_MGe = both.split((k_TGd.shape[-1], v_TGe.shape[-1]), -1)
        return self._inner(layer, q_THd, k_MGd, v_MGe, terms, sinks_H=sinks_H, index=index)

    def carry(self, layer: int) -> Any:
        """What a recurrent layer left behind is on another rank."""
        raise AssertionError(f"layer {layer} remembers by a state, which cannot be cut over context ranks")


# -- who has which token --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slots:
    """``source_t`` says which token fills each of this rank's slots, -1 for padding; ``place_t`` where it stands.

    ``lengths`` are the padded sequences', which divide into ``pieces`` each.
    """

    source_t: NDArray[np.int64]
    place_t: NDArray[np.int64]
    lengths: list[int]
    pieces: int


def slots_of(lengths: Sequence[int], *, rank: int, context: int, multiple: int) -> Slots:
    """The slots of one of several ``context`` ranks, as many on each, a ``multiple`` of so many.

    >>> slots_of([3, 5], rank=0, context=2, multiple=1).source_t.tolist()
    [0, -1, 3, 4, -1, -1]
    """
    pieces = 2 * context
    padded = [-(-n // pieces) * pieces for n in lengths]
    while sum(padded) // context % multiple:
        padded[-1] += pieces
    sources: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    start = 0
    for real, length in zip(lengths, padded, strict=True):
        size = length // pieces
        place = np.concatenate([np.arange(j * size, (j + 1) * size) for j in (rank, pieces - 1 - rank)])
        sources.append(np.where(place < real, start + place, -1))
        places.append(np.where(place < real, place, 0))
        start += real
    return Slots(np.concatenate(sources), np.concatenate(places), padded, pieces)


def segments_of(slots: Slots, *, rank: int, context: int) -> list[Segment]:
    """This rank's runs of queries, and where the keys before them lie when all ranks' slots stand one after another."""
    each = len(slots.source_t)
    out: list[Segment] = []
    offset = 0
    for length in slots.lengths:
        size = length // slots.pieces
        # Piece j is the first of rank j's two, or the second of its mirror's.
        firsts = [
            min(j, slots.pieces - 1 - j) * each + offset + (0 if j < context else size) for j in range(slots.pieces)
        ]
        for j in (rank, slots.pieces - 1 - rank):
            out.append(Segment(size, tuple((first, size) for first in firsts[: j + 1])))
        offset += 2 * size
    return out


# -- the micro-batch ------------------------------------------------------------------------


@dataclass
class Packed(PackedSeqParams):
    """What reaches every layer of a forward, also one that runs again in backward."""

    qkv_format: str = "thd"
    at: Positions = field(kw_only=True)
    attend: Attend = field(kw_only=True)
    replay: Replay | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A micro-batch of this rank: its tokens, what its layers are told, and the slots ``at_r`` that predict."""

    tokens_1t: Tensor
    packed: Packed
    at_r: Tensor
    tokens: Shared | None


def batch_of(
    rows: Rows, spec: DecoderSpec, rings: Rings, *, sequence: bool, dtype: torch.dtype, counted: bool = False
) -> Batch:
    """``rows`` as this rank has them; ``sequence`` says that tensor ranks share tokens between a layer's parts.

    Experts are ``counted`` also where none are replayed.
    """
    longest, most = max(rows.lengths), spec.max_positions
    if longest > most:
        raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
    multiple = rings.tensor.world if sequence else 1
    cut = _filled(rows, multiple) if rings.context.world == 1 else _dealt(rows.apart(), rings.context, multiple)
    replay = None
    if spec.moe is not None and (cut.told_tLk is not None or rows.used is not None or counted):
        part = rings.tensor.rank if sequence else 0
        told_tLk = None if cut.told_tLk is None else cut.told_tLk.chunk(multiple)[part]
        replay = Replay(spec, told_tLk, rows.used, cut.real_t.chunk(multiple)[part])
    packed = Packed(at=Positions(cut.positions_t, most, dtype), attend=cut.attend, replay=replay)
    return Batch(tokens_1t=cut.tokens_t[None], packed=packed, at_r=cut.at_r, tokens=cut.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """This rank's slots, which of them hold a token of the rows, and what is asked of them."""

    tokens_t: Tensor
    real_t: Tensor
    positions_t: Tensor
    told_tLk: Tensor | None
    attend: Attend
    at_r: Tensor
    tokens: Shared | None = None


def _filled(rows: Rows, multiple: int) -> _Cut:
    """All of the rows, and behind them a sequence that fills up."""
    missing = -len(rows.tokens_T) % multiple
    lengths, stretches, told_tLk = rows.lengths, rows.stretches, rows.replay_TLk
    if missing:
        lengths, stretches = (*lengths, missing), (*stretches, Stretch(missing)) if stretches else ()
        if told_tLk is not None:
            told_tLk = torch.cat((told_tLk, told_tLk.new_full((missing, *told_tLk.shape[1:]), -1)))
    none_m = rows.tokens_T.new_zeros(missing)
    return _Cut(
        tokens_t=torch.cat((rows.tokens_T, none_m)),
        real_t=torch.cat((torch.ones_like(rows.tokens_T), none_m)).bool(),
        positions_t=torch.cat((rows.positions_T, none_m)),
        told_tLk=told_tLk,
        attend=attend_of(lengths, stretches, rows.tokens_T.device),
        at_r=rows.before_R,
    )


def _dealt(rows: Rows, ring: Ring, multiple: int) -> _Cut:
    """This context rank's pieces of every sequence."""
    device = rows.tokens_T.device
    slots = slots_of(rows.lengths, rank=ring.rank, context=ring.world, multiple=multiple)
    source_t = torch.from_numpy(slots.source_t).to(device)
    real_t, taken_t = source_t >= 0, source_t.clamp(min=0)
    told_tLk = rows.replay_TLk
    if told_tLk is not None:
        told_tLk = torch.where(real_t[:, None, None], told_tLk.index_select(0, taken_t), -1)
    slot_T = np.full(sum(rows.lengths), -1, np.int64)
    filled = np.flatnonzero(slots.source_t >= 0)
    slot_T[slots.source_t[filled]] = filled
    at_R = torch.from_numpy(slot_T).to(device).index_select(0, rows.before_R)
    mine_r = (at_R >= 0).nonzero()[:, 0]
    segments = segments_of(slots, rank=ring.rank, context=ring.world)
    inner = SegmentAttend(segments, device, keys=ring.world * len(source_t))
    return _Cut(
        real_t=real_t,
        tokens_t=torch.where(real_t, rows.tokens_T.index_select(0, taken_t), 0),
        positions_t=torch.from_numpy(slots.place_t).to(device),
        told_tLk=told_tLk,
        attend=GatheredAttend(inner, ring),
        at_r=at_R.index_select(0, mine_r),
        tokens=Shared(mine_r, len(at_R), ring),
    )
