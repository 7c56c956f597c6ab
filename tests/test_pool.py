"""The process pool of distributed tests returns results in order, and reports the traceback of a failure."""

import pytest
import torch
from tests.pool import ranks
from torch import distributed as dist


def total(rank: int, world: int, base: int) -> float:
    x = torch.tensor(float(base + rank))
    dist.all_reduce(x)
    return float(x)


def fails_last(rank: int, world: int) -> int:
    assert rank + 1 < world, "the last rank fails"
    return rank


def test_ranks_communicate_and_are_reused() -> None:
    assert ranks(2, total, 1) == [3.0, 3.0]
    assert ranks(3, total, 0) == [3.0, 3.0, 3.0]


def test_a_rank_that_fails_is_quoted() -> None:
    with pytest.raises(AssertionError, match="the last rank fails"):
        ranks(2, fails_last)
    assert ranks(2, total, 2) == [5.0, 5.0]
