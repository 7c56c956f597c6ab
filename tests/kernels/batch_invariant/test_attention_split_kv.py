"""Steps of single tokens are cut into chunks: every token of a row is met once, and partial results are in order."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.batch_invariant.attention_reference import BLOCK, CHUNK
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan

CPU = torch.device("cpu")


@st.composite
def steps(draw):
    """Families of rows (tokens in common, what each adds), a window or none, and room for items."""
    families = draw(st.lists(st.tuples(st.integers(0, 1400), st.lists(st.integers(0, 900), max_size=5)), max_size=4))
    lengths, group, shared = [], [], []
    for number, (common, more) in enumerate(families):
        for each in more:
            lengths.append(0 if each == 0 else common + each)
            group.append(number)
            shared.append(common)
    window = draw(st.sampled_from([None, 1, 100, 700]))
    return *(np.array(x, np.int64) for x in (lengths, group, shared)), window, draw(st.sampled_from([40, 400]))


def filled(work, lengths, group, shared, window):
    work.fill(lengths, group, shared, kv_heads=2, queries_per_kv=4, sms=4, window=window)
    return work.host_arrays()


@given(steps())
@settings(deadline=None, max_examples=examples(150))
def test_every_token_is_met_once_and_in_the_chunk_it_is_of(step):
    lengths, group, shared, window, room = step
    lists = filled(BatchInvariantSplitKVPlan(20, room, CPU, prefix_queries=16), lengths, group, shared, window)
    trunks = int(lists.counts[0])
    places: list[dict[int, list[tuple[int, int]]]] = [{} for _ in lengths]
    for number, (first, rows, place, begin, end) in enumerate(lists.items_I.tolist()):
        assert begin < end and rows * 4 <= 16 and (rows == 1 or number < trunks)
        for row in range(first, first + rows):
            assert end <= lengths[row] and (number >= trunks or end < lengths[row])
            places[row].setdefault(place, []).append((begin, end))
    for row, (length, found) in enumerate(zip(lengths, places, strict=True)):
        assert sorted(found) == list(range(lists.base_B[row + 1] - lists.base_B[row]))
        # A leaf goes on where a trunk stopped, in the trunk's place: the trunk was met before.
        stretches = [stretch for place in sorted(found) for stretch in found[place]]
        at = stretches[0][0] if stretches else 0
        assert at % CHUNK == 0 and at <= max(0, length - (window or length))
        for begin, end in stretches:
            skipped = window is not None and begin > at and begin % CHUNK == 0 and begin <= length - window
            assert begin == at or skipped
            assert end == length or end % BLOCK == 0
            at = end
        assert at == length


def test_trunks_that_are_items_but_no_places_count_as_room():
    # Two rows of two chunks that share half of the first: four places, and with the trunk five items.
    lengths, group, shared = np.array([700] * 2), np.zeros(2, np.int64), np.array([256] * 2)
    lists = filled(BatchInvariantSplitKVPlan(2, 4, CPU, prefix_queries=16), lengths, group, shared, None)
    assert lists.counts.tolist() == [0, 4] and sorted(lists.items_I[:, 4].tolist()) == [512, 512, 700, 700]


@given(steps(), st.lists(st.integers(1, 40), max_size=3))
@settings(deadline=None, max_examples=examples(60))
def test_rows_that_grow_are_cut_as_if_they_came_anew(step, more):
    lengths, group, shared, window, room = step
    work = BatchInvariantSplitKVPlan(20, room, CPU, prefix_queries=16)
    filled(work, lengths, group, shared, window)
    for n in more:
        lengths = np.where(lengths > 0, lengths + n, 0)
        grown = filled(work, lengths, group, shared, window)
    lists = filled(work, lengths, group, shared, window)
    ends = {}
    for first, rows, _, _, end in lists.items_I.tolist():
        for row in range(first, first + rows):
            ends[row] = max(ends.get(row, 0), end)
    assert all(ends.get(row, 0) == length for row, length in enumerate(lengths))
    assert lists.length_B[: len(lengths)].tolist() == lengths.tolist()
    if more:
        assert grown.counts.tolist() == lists.counts.tolist()
