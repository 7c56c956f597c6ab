"""Tensor parallel in training: how a rank's decoder is joined to the others', and gradients that lie as summands.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from miles.backends.fsdp.collective import entered, rows_gathered, rows_summed, summed, summed_within
from miles.backends.fsdp.mesh import Ring
from miles.models.rank import Joints
from miles.models.shard import Copied, Part, Share

# Bytes of gradients that are added up at a time.
_BUCKET = 64 << 20


def joints(ring: Ring, *, sequence: bool) -> Joints:
    """With ``sequence`` a rank has some of the tokens between a layer's parts, and all of them inside."""
    within = partial(summed_within, ring=ring)
    if sequence:
        return Joints(reduce=partial(rows_summed, ring=ring), within=within, enter=partial(rows_gathered, ring=ring))
    return Joints(reduce=partial(summed, ring=ring), within=within, enter=partial(entered, ring=ring))


class Rows:
    """``train.logits.Vocabulary`` of one tensor rank: its rows of the head."""

    def __init__(self, vocab_size: int, ring: Ring) -> None:
        self.first, end = Part(vocab_size).bounds(ring.rank, ring.world)
        self.size = end - self.first
        self._ring = ring

    def sum(self, x: Tensor) -> Tensor:
        return self._ring.sum(x.clone())

    def most(self, x: Tensor) -> Tensor:
        return self._ring.most(x.clone())


# -- gradients --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Summand:
    """What ranks add up: ``unit`` of ``units``, each of which some of the ranks have."""

    view: Tensor
    unit: int = 0
    units: int = 1

    @property
    def numel(self) -> int:
        return self.view.numel() * self.units

    def put(self, into: Tensor) -> None:
        into.view(self.units, -1)[self.unit] = self.view.flatten()

    def take(self, summed: Tensor) -> None:
        self.view.copy_(summed.view(self.units, -1)[self.unit].view(self.view.shape))


def settle(
    grads: Mapping[str, Tensor], shares: Mapping[str, Share], starts: Mapping[str, int], ring: Ring, *, sequence: bool
) -> None:
    """Make gradients whole in place: those of whole parameters that are summands, and those of rows held twice.

    ``starts`` says which row of the tensor rank's part a gradient's first is. A parameter that only the first rank has
    gets no gradient on the others. With ``sequence`` what stands between a layer's parts saw some of the tokens.
    """
    if ring.world == 1:
        return
    summands: list[_Summand] = []
    for name, grad in grads.items():
        share = shares[name]
        if share.lone and ring.rank:
            grad.zero_()
        elif not share.parts and not share.lone and (share.sees or sequence):
            summands.append(_Summand(grad))
        for rows, run in copied(share, starts[name], len(grad), ring):
            summands.append(_Summand(grad[rows], run.unit, run.units))
    for bucket in _buckets(summands):
        flat = torch.zeros(sum(one.numel for one in bucket), dtype=bucket[0].view.dtype, device=bucket[0].view.device)
        parts = flat.split([one.numel for one in bucket])
        for one, part in zip(bucket, parts, strict=True):
            one.put(part)
        parts = ring.sum(flat).split([one.numel for one in bucket])
        for one, part in zip(bucket, parts, strict=True):
            one.take(part)


def copied(share: Share, first: int, count: int, ring: Ring) -> Iterator[tuple[slice, Copied]]:
    """Those of ``count`` rows from ``first`` on, of this rank's part, that other ranks have too."""
    for run in share.copied(ring.rank, ring.world):
        assert share.dim == 0, "what is held twice is rows"
        start, stop = max(run.start, first), min(run.start + run.rows, first + count)
        if start < stop:
            yield slice(start - first, stop - first), run


def _buckets(summands: Sequence[_Summand]) -> Iterator[list[_Summand]]:
    """Few enough for one sum, all of one dtype."""
    bucket: list[_Summand] = []
    held = 0
    for one in summands:
        nbytes = one.numel * one.view.element_size()
        if bucket and (held + nbytes > _BUCKET or one.view.dtype != bucket[0].view.dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(one)
        held += nbytes
    if bucket:
        yield bucket
