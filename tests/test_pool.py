"""The borrowed ranks of the tests themselves: they are joined, answer in order, and tell what went wrong."""

import pytest
import torch
from tests.pool import ranks
from torch import distributed as dist


def total(rank: int, world: int, base: int) -> float:
    x = torch.tensor(float(base + rank))
    dist.all_reduce(x)
    return float(x)


def fails_last(rank: int, world: int) -> int:
    assert rank + 1 < world, "the last one must not"
    return rank


def test_ranks_hear_each_other_and_are_used_again() -> None:
    assert ranks(2, total, 1) == [3.0, 3.0]
    assert ranks(3, total, 0) == [3.0, 3.0, 3.0]


def test_a_rank_that_fails_is_quoted() -> None:
    with pytest.raises(AssertionError, match="the last one must not"):
        ranks(2, fails_last)
    assert ranks(2, total, 2) == [5.0, 5.0]
