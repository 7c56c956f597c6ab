import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import UsageError
from miles.train.micro_batching import split_by_count, split_by_tokens

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


@given(LENGTHS, st.integers(100, 300))
def test_every_sample_is_in_exactly_one_bin_and_no_bin_is_over_the_budget(lengths, budget):
    bins = split_by_tokens(lengths, budget)
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    assert all(chosen and sum(lengths[i] for i in chosen) <= budget for chosen in bins)


@given(LENGTHS, st.integers(100, 300))
def test_first_fit_decreasing_leaves_no_two_bins_that_would_fit_together(lengths, budget):
    loads = [sum(lengths[i] for i in chosen) for chosen in split_by_tokens(lengths, budget)]
    assert all(a + b > budget for n, a in enumerate(loads) for b in loads[n + 1 :])


@given(LENGTHS, st.integers(100, 300))
def test_bins_are_in_order_and_the_same_every_time(lengths, budget):
    bins = split_by_tokens(lengths, budget)
    assert bins == sorted(sorted(chosen) for chosen in bins) == split_by_tokens(lengths, budget)


def test_a_sample_over_the_budget_is_refused_with_its_length_and_the_flag():
    with pytest.raises(UsageError, match=r"129 tokens .*--max-tokens-per-gpu 128"):
        split_by_tokens([5, 129], 128)


@given(st.integers(0, 40), st.integers(1, 9))
def test_fixed_counts_cut_in_order(number, size):
    bins = split_by_count(number, size)
    assert [i for chosen in bins for i in chosen] == list(range(number))
    assert all(len(chosen) == size for chosen in bins[:-1])
