"""Tensor parallelism in training: the collectives of a rank's decoder, and the reduction of partial gradients.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from miles.backends.fsdp.autograd_collectives import (
    all_reduce_with_grad,
    copy_to_parallel_region,
    gather_from_sequence_region,
    reduce_from_parallel_region,
    reduce_scatter_to_sequence_region,
)
from miles.backends.fsdp.device_mesh import CommGroup
from miles.models.parallel.tp_decoder import TpCollectives
from miles.models.parallel.tp_sharding import ReplicatedRows, ShardSegment, TpShard

# Bytes of gradients per all-reduce.
_BUCKET = 64 << 20


def build_tp_collectives(group: CommGroup, *, sequence: bool) -> TpCollectives:
    """Build the collectives; with ``sequence`` parallelism the residual stream has only this rank's tokens."""
    all_reduce = partial(all_reduce_with_grad, group=group)
    if sequence:
        return TpCollectives(
            reduce_from_tp=partial(reduce_scatter_to_sequence_region, group=group),
            all_reduce=all_reduce,
            copy_to_tp=partial(gather_from_sequence_region, group=group),
            select_own=lambda x_TD: x_TD.chunk(group.world)[group.rank],
        )
    return TpCollectives(
        reduce_from_tp=partial(reduce_from_parallel_region, group=group),
        all_reduce=all_reduce,
        copy_to_tp=partial(copy_to_parallel_region, group=group),
    )


class VocabShard:
    """The rows of the output head of one tensor-parallel rank, without those of padding."""

    def __init__(self, vocab_size: int, group: CommGroup, *, padding: int = 0) -> None:
        bounds = ShardSegment(vocab_size + padding).bounds(group.rank, group.world)
        self.first, end = (min(bound, vocab_size) for bound in bounds)
        self.size = end - self.first
        self._group = group

    def sum(self, x: Tensor) -> Tensor:
        return self._group.sum(x.clone())

    def max(self, x: Tensor) -> Tensor:
        return self._group.max(x.clone())


# -- gradients --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PartialGrad:
    """A gradient to be summed: ``unit`` of ``units``, each of which some of the ranks have."""

    view: Tensor
    unit: int = 0
    units: int = 1

    @property
    def numel(self) -> int:
        return self.view.numel() * self.units

    def write_to(self, into: Tensor) -> None:
        into.view(self.units, -1)[self.unit] = self.view.flatten()

    def read_from(self, summed: Tensor) -> None:
        self.view.copy_(summed.view(self.units, -1)[self.unit].view(self.view.shape))


def reduce_partial_grads(
    grads: Mapping[str, Tensor],
    shards: Mapping[str, TpShard],
    starts: Mapping[str, int],
    group: CommGroup,
    *,
    sequence: bool,
) -> None:
    """All-reduce partial gradients in place: those of replicated parameters, and of replicated rows.

    ``starts`` is the first row of each gradient within the tensor-parallel part. A parameter that only the first rank
    has gets no gradient on the others. With ``sequence`` parallelism the gradients of the residual-stream norms are
    partial too.
    """
    if group.world == 1:
        return
    partials: list[_PartialGrad] = []
    for name, grad in grads.items():
        shard = shards[name]
        if shard.first_rank_only and group.rank:
            grad.zero_()
        elif not shard.segments and not shard.first_rank_only and (shard.partial_grad or sequence):
            partials.append(_PartialGrad(grad))
        for rows, run in iter_replicated_rows(shard, starts[name], len(grad), group):
            partials.append(_PartialGrad(grad[rows], run.unit, run.units))
    for bucket in _buckets(partials):
        flat = torch.zeros(
            sum(partial_grad.numel for partial_grad in bucket), dtype=bucket[0].view.dtype, device=bucket[0].view.device
        )
        parts = flat.split([partial_grad.numel for partial_grad in bucket])
        for partial_grad, part in zip(bucket, parts, strict=True):
            partial_grad.write_to(part)
        parts = group.sum(flat).split([partial_grad.numel for partial_grad in bucket])
        for partial_grad, part in zip(bucket, parts, strict=True):
            partial_grad.read_from(part)


def iter_replicated_rows(
    shard: TpShard, first: int, count: int, group: CommGroup
) -> Iterator[tuple[slice, ReplicatedRows]]:
    """Yield those of ``count`` rows from ``first`` on, of this rank's part, that other ranks have too."""
    for run in shard.replicated_rows(group.rank, group.world):
        assert shard.dim == 0, "only rows are replicated"
        start, stop = max(run.start, first), min(run.start + run.rows, first + count)
        if start < stop:
            yield slice(start - first, stop - first), run


def _buckets(partials: Sequence[_PartialGrad]) -> Iterator[list[_PartialGrad]]:
    """Group into buckets of limited size and one dtype."""
    bucket: list[_PartialGrad] = []
    bucket_bytes = 0
    for partial_grad in partials:
        nbytes = partial_grad.numel * partial_grad.view.element_size()
        if bucket and (bucket_bytes + nbytes > _BUCKET or partial_grad.view.dtype != bucket[0].view.dtype):
            yield bucket
            bucket, bucket_bytes = [], 0
        bucket.append(partial_grad)
        bucket_bytes += nbytes
    if bucket:
        yield bucket
