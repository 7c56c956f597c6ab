from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.train.small_trainer import DENSE

from miles.core.errors import UsageError
from miles.models.families import spec_from_config
from miles.train.balance import build_flops_cost, partition_micro_batches
from miles.train.micro_batching import PatchLimit, split_by_count, split_by_tokens

LENGTHS = st.lists(st.integers(1, 100), max_size=60)
HOW = st.fixed_dictionaries(
    {
        "dp_size": st.integers(1, 7),
        "budget": st.integers(50, 150),
        "cp_size": st.integers(2, 3),
        "count": st.none() | st.integers(1, 5),
        "balanced": st.booleans(),
    }
)


def flat(distributed):
    return sorted(i for part in distributed for chosen in part for i in chosen)


@given(LENGTHS, HOW)
def test_every_unit_is_in_one_micro_batch_of_one_part_and_none_is_over_its_room(lengths, how):
    distributed = partition_micro_batches(lengths, **how)
    assert len(distributed) == how["dp_size"]
    assert flat(distributed) == list(range(len(lengths)))
    for chosen in (chosen for part in distributed for chosen in part):
        assert chosen == sorted(chosen)
        if how["count"] is None:
            assert sum(lengths[i] for i in chosen) <= how["budget"] * how["cp_size"]
        else:
            assert len(chosen) <= how["count"]


@given(LENGTHS, HOW)
def test_all_parts_have_as_many_micro_batches_and_only_a_lack_of_units_leaves_one_empty(lengths, how):
    distributed = partition_micro_batches(lengths, **how)
    assert len({len(part) for part in distributed}) == 1
    bins = [chosen for part in distributed for chosen in part]
    empty = bins.count([])
    if how["balanced"]:
        assert not empty or len(lengths) == len(bins) - empty
    else:
        assert all(not part.count([]) or sum(map(len, part)) == len(part) - part.count([]) for part in distributed)


@given(LENGTHS, HOW)
def test_no_more_micro_batches_are_made_than_the_packing_of_the_whole_batch_needs(lengths, how):
    distributed = partition_micro_batches(lengths, **(how | {"balanced": True}))
    budget, count = how["budget"] * how["cp_size"], how["count"]
    needed = len(split_by_tokens(lengths, budget) if count is None else split_by_count(len(lengths), count))
    assert len(distributed[0]) == -(-needed // how["dp_size"])


@given(LENGTHS, st.integers(100, 300), st.booleans())
def test_one_part_has_exactly_what_the_packing_gives(lengths, budget, balanced):
    assert partition_micro_batches(lengths, dp_size=1, budget=budget, balanced=balanced) == [
        split_by_tokens(lengths, budget)
    ]
    assert partition_micro_batches(lengths, dp_size=1, budget=budget, count=3) == [split_by_count(len(lengths), 3)]


@given(LENGTHS, HOW)
def test_the_deal_is_the_same_every_time(lengths, how):
    assert partition_micro_batches(lengths, **how) == partition_micro_batches(lengths, **how)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(2, 6))
def test_with_room_enough_the_parts_are_as_even_as_the_dearest_first_makes_them(lengths, parts):
    distributed = partition_micro_batches(lengths, dp_size=parts, budget=10_000)
    loads = [sum(lengths[i] for chosen in part for i in chosen) for part in distributed]
    # No deal is better than the mean and the longest; the dearest first is never a third worse than the best.
    assert max(loads) <= 4 / 3 * max(sum(lengths) / parts + max(lengths), max(lengths))
    assert max(loads) - min(loads) <= max(lengths)


@given(st.lists(st.integers(20, 100), min_size=30, max_size=60), st.integers(2, 4))
def test_parts_differ_by_no_more_than_their_dearest_micro_batch_however_tight_the_room(lengths, parts):
    distributed = partition_micro_batches(lengths, dp_size=parts, budget=150)
    loads = [[sum(lengths[i] for i in chosen) for chosen in part] for part in distributed]
    totals = [sum(part) for part in loads]
    assert max(totals) - min(totals) <= max(max(part) for part in loads)
    # What is done at the same time is alike: each round's cheapest is no cheaper than the next round's dearest.
    rounds = [sorted(each) for each in zip(*loads, strict=True)]
    assert all(now[0] >= after[-1] for now, after in pairwise(rounds))


def test_operations_weigh_a_long_sample_more_than_as_many_tokens_in_short_ones():
    price = build_flops_cost(spec_from_config(DENSE))
    assert price(60) > 2 * price(30) > 2 * 30 * price(1)
    lengths = [64, *[8] * 8]
    costs = [float(n * n) for n in lengths]
    by_token, by_cost = (partition_micro_batches(lengths, dp_size=2, budget=200, costs=c) for c in (None, costs))
    assert by_token == [[[0]], [[1, 2, 3, 4, 5, 6, 7, 8]]]
    lengths, costs = [64, 64, *[8] * 8], [4096.0, 4096.0, *[64.0] * 8]
    assert [len(part[0]) for part in partition_micro_batches(lengths, dp_size=2, budget=200, costs=costs)] == [5, 5]
    assert by_cost == by_token


def test_without_balance_parts_are_neighbours():
    assert partition_micro_batches([50, 50, 1, 1], dp_size=2, budget=100, balanced=False) == [[[0, 1]], [[2, 3]]]
    assert partition_micro_batches([50, 50, 1, 1], dp_size=2, budget=60, balanced=False) == [[[0], [1]], [[2], [3]]]
    assert partition_micro_batches([50, 50, 20], dp_size=2, budget=60, balanced=False) == [[[0], []], [[1], [2]]]


def test_a_unit_that_fits_no_micro_batch_is_refused_with_the_ranks_that_share_one():
    with pytest.raises(
        UsageError, match=r"a pair of 129 tokens .*--max-tokens-per-gpu 64 on 2 context-parallel ranks; .* 65"
    ):
        partition_micro_batches([5, 129], dp_size=2, budget=64, cp_size=2, unit_name="pair")


@given(LENGTHS, st.integers(2, 4), st.booleans())
def test_ranks_have_no_micro_batch_with_more_patches_than_allowed(lengths, parts, balanced):
    units = [{f"shared {i % 5}": 10 * (i % 5), f"own {i}": 7} for i in range(len(lengths))]
    limit = PatchLimit(patches=units, limit=100)
    distributed = partition_micro_batches(lengths, dp_size=parts, budget=1000, balanced=balanced, patch_limit=limit)
    assert flat(distributed) == list(range(len(lengths)))
    assert all(limit.count(chosen) <= 100 for part in distributed for chosen in part)
