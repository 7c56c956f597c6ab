import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.core.errors import UsageError
from miles.train.micro_batching import PatchLimit, split_by_count, split_by_tokens

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


IMAGES = st.lists(st.dictionaries(st.sampled_from("abcdefg"), st.just(0), max_size=3), min_size=60, max_size=60)
PATCHES = dict(zip("abcdefg", (4, 8, 16, 20, 30, 40, 50), strict=True))


@given(LENGTHS, st.integers(100, 300), st.integers(150, 250), IMAGES)
def test_no_bin_has_more_patches_than_allowed_and_an_image_of_several_samples_counts_once(
    lengths, budget, limit, images
):
    units = [{digest: PATCHES[digest] for digest in unit} for unit in images[: len(lengths)]]
    bins = split_by_tokens(lengths, budget, patch_limit=PatchLimit(patches=units, limit=limit))
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    for chosen in bins:
        assert sum(lengths[i] for i in chosen) <= budget
        assert sum(PATCHES[digest] for digest in {d for i in chosen for d in units[i]}) <= limit


def test_samples_of_one_image_share_a_bin_that_would_be_too_small_for_several_images():
    same, other = {"a": 60}, {"b": 60}
    assert split_by_tokens([5] * 4, 100, patch_limit=PatchLimit(patches=[same] * 4, limit=100)) == [[0, 1, 2, 3]]
    mixed = PatchLimit(patches=[same, other, same, other], limit=100)
    assert split_by_tokens([5] * 4, 100, patch_limit=mixed) == [[0, 2], [1, 3]]


def test_an_image_over_the_limit_is_refused_with_its_patches_and_the_flag():
    with pytest.raises(UsageError, match=r"pair with 300 image patches .*--max-patches-per-gpu 256"):
        split_by_tokens([5], 128, "pair", patch_limit=PatchLimit(patches=[{"a": 300}], limit=256))
