"""What passes between tensor ranks carries the gradient one process would have; every token is in one vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pool import ranks
from torch import Tensor

from miles.backends.fsdp import autograd_collectives, tensor_parallel
from miles.backends.fsdp.device_mesh import CommGroup, FsdpMesh
from miles.cluster.parallel_dims import ParallelDims
from miles.models.parallel.tp_sharding import ShardSegment, TpShard


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def met(
    group: CommGroup, function: Callable[[Tensor, CommGroup], Tensor], given: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """What ``function`` makes of ``given``, and the gradient of its product with ``weight``."""
    x = given.clone().requires_grad_()
    out = function(x, group)
    (out * weight).sum().backward()
    assert x.grad is not None
    return out.detach(), x.grad


def joined(rank: int, world: int) -> dict[str, tuple[Tensor, Tensor]]:
    group = FsdpMesh(ParallelDims(world=world, tensor=world), torch.device("cpu")).tp_group
    own, same = draw(rank, 4, 3), draw(9, 4, 3)
    return {
        "copy_to_parallel_region": met(
            group, autograd_collectives.copy_to_parallel_region, same, draw(10 + rank, 4, 3)
        ),
        "reduce_from_parallel_region": met(
            group, autograd_collectives.reduce_from_parallel_region, own, draw(20, 4, 3)
        ),
        "all_reduce_with_grad": met(group, autograd_collectives.all_reduce_with_grad, own, draw(30 + rank, 4, 3)),
        "gather_from_sequence_region": met(
            group, autograd_collectives.gather_from_sequence_region, own, draw(40 + rank, 8, 3)
        ),
        "reduce_scatter_to_sequence_region": met(
            group, autograd_collectives.reduce_scatter_to_sequence_region, own, draw(50 + rank, 2, 3)
        ),
        "gather_replicated": met(group, autograd_collectives.gather_replicated, own, draw(60, 8, 3)),
    }


def test_sums_and_gathers_give_the_gradient_of_what_they_stand_for():
    """The oracle is the definition: the loss is the sum of the ranks', or one loss that all have alike."""
    own = [draw(rank, 4, 3) for rank in (0, 1)]
    for rank, found in enumerate(ranks(2, joined)):

        def check(name: str, out: Tensor, grad: Tensor, found=found) -> None:
            assert torch.allclose(found[name][0], out), name
            assert torch.allclose(found[name][1], grad), name

        mine = slice(4 * rank, 4 * rank + 4)
        check("copy_to_parallel_region", draw(9, 4, 3), draw(10, 4, 3) + draw(11, 4, 3))
        check("reduce_from_parallel_region", own[0] + own[1], draw(20, 4, 3))
        check("all_reduce_with_grad", own[0] + own[1], draw(30, 4, 3) + draw(31, 4, 3))
        check("gather_from_sequence_region", torch.cat(own), (draw(40, 8, 3) + draw(41, 8, 3))[mine])
        check(
            "reduce_scatter_to_sequence_region",
            (own[0] + own[1])[2 * rank : 2 * rank + 2],
            torch.cat((draw(50, 2, 3), draw(51, 2, 3))),
        )
        check("gather_replicated", torch.cat(own), draw(60, 8, 3)[mine])


@dataclass
class FakeGroup:
    """A group with a rank and a size only."""

    rank: int
    world: int


@given(st.integers(1, 100), st.integers(1, 9))
def test_every_token_is_in_one_rank_s_rows(size, world):
    rows = [tensor_parallel.VocabShard(size, FakeGroup(rank, world)) for rank in range(world)]  # pyright: ignore[reportArgumentType]
    assert [first for r in rows for first in range(r.first, r.first + r.size)] == list(range(size))


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 40), st.integers(0, 40))
def test_rows_held_by_several_ranks_are_counted_by_the_first_alone(units, times, rows, start, count):
    """Over ranks and pieces of their parts, each unit's rows are counted once."""
    world = units * times
    share = TpShard(segments=(ShardSegment(world, 2), ShardSegment(units, rows, repeat=True)))
    counted = {(unit, row): 0 for unit in range(units) for row in range(rows)}
    for rank in range(world):
        held = 2 + rows
        first, last = min(start, held), min(start + count, held)
        for cut in ((0, first), (first, last), (last, held)):
            for where, run in tensor_parallel.iter_replicated_rows(
                share, cut[0], cut[1] - cut[0], FakeGroup(rank, world)
            ):  # pyright: ignore[reportArgumentType]
                for row in range(*where.indices(held)):
                    counted[run.unit, cut[0] + row - run.start] += run.first
    assert set(counted.values()) <= ({1} if times > 1 else {0})
