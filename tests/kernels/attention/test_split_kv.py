"""A step is cut so that every token of every row is read exactly once, and no two results meet."""

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.kernels.attention.split_kv import STEP, SplitKVPlan

CPU = torch.device("cpu")


def made(rows: int = 64, items: int = 256, **more: int) -> SplitKVPlan:
    return SplitKVPlan(rows, items, CPU, **more)


def lowest(length: int, window: int | None, chunk: int | None) -> int:
    low = 0 if window is None else max(0, length - window)
    return low if chunk is None else max(low, (length - 1) // chunk * chunk)


def check(work: SplitKVPlan, lengths, *, most: int, window=None, chunk=None) -> list[tuple[int, int, int, int, int]]:
    """Every seen token once, places of partial results dense and apart; gives the items of trunks."""
    lists = work.host_arrays()
    trunks = int(lists.counts[0])
    read = [np.zeros(n, int) for n in lengths]
    taken: set[int] = set()
    for number, (row, rows, piece, begin, end) in enumerate(lists.items_I.tolist()):
        assert 0 <= begin < end
        assert rows <= most if number < trunks else rows == 1
        for each in range(row, row + rows):
            read[each][begin:end] += 1
            place = int(lists.base_B[each]) + piece
            assert place < lists.base_B[each + 1] and place not in taken
            taken.add(place)
    assert taken == set(range(lists.base_B[-1]))
    assert len(taken) <= work.max_items
    for length, times in zip(lengths, read, strict=True):
        low = lowest(length, window, chunk)
        assert (times[low:] == 1).all() and (times[:low] <= 1).all()
    assert lists.length_B[: len(lengths)].tolist() == list(lengths) and not lists.length_B[len(lengths) :].any()
    return [tuple(item) for item in lists.items_I[:trunks].tolist()]


families = st.lists(
    st.tuples(st.integers(0, 300), st.lists(st.integers(0, 700), min_size=1, max_size=9)), min_size=1, max_size=7
)


@given(
    families,
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 4, 7, 40]),
    st.sampled_from([1, 3, 132]),
    st.one_of(st.none(), st.integers(1, 400)),
    st.one_of(st.none(), st.integers(1, 400)),
)
@example([(128, [1, 0, 5])], 1, 4, 132, None, None)
@example([(300, [0] * 9)] * 7, 8, 4, 132, None, None)
@settings(max_examples=examples(150), deadline=None)
def test_every_token_is_read_once_for_every_row(groups, heads, queries, sms, window, chunk):
    """Families of rows: what they have in common, and the rest of each; 0 tokens in all is a row nobody asks for."""
    lengths = np.array([depth + own for depth, owns in groups for own in owns])
    group = np.array([number for number, (_, owns) in enumerate(groups) for _ in owns])
    shared = np.array([depth for depth, owns in groups for _ in owns])
    work = made(64, 140)
    terms = {"kv_heads": heads, "queries_per_kv": queries, "sms": sms, "window": window, "chunk": chunk}
    work.fill(lengths, group, shared, **terms)
    check(work, lengths, most=64 // queries, window=window, chunk=chunk)
    assert work.has_prefixes == bool(work.host_arrays().counts[0])


def test_neighbours_share_a_trunk_in_tiles_of_queries_and_keep_their_last_token():
    work = made(prefix_queries=16)
    lengths, ones = np.array([400] * 7 + [256, 300, 500]), np.ones(10, np.int64)
    shared = np.array([0, 256, 256, 256, 256, 256, 256, 256, 300, 0])
    work.fill(lengths, np.array([5] * 8 + [6, 6]) * ones, shared, kv_heads=1, queries_per_kv=4, sms=1)
    trunks = check(work, lengths, most=4)
    assert sorted({(row, rows) for row, rows, *_ in trunks}) == [(0, 4), (4, 4)]
    assert max(end for *_, end in trunks) == 255


def test_a_short_trunk_or_one_of_a_single_row_is_part_of_its_leaves():
    work = made()
    for shared, group in ((STEP - 1, [1, 1, 1]), (200, [1, 2, 3])):
        work.fill(np.array([300, 300, 300]), np.array(group), np.full(3, shared), kv_heads=1, queries_per_kv=1, sms=132)
        assert not work.has_prefixes and check(work, [300] * 3, most=1) == []


def test_one_long_row_is_spread_over_all_processors_and_many_are_not_cut_small():
    work, one = made(256, 1024), np.zeros(1, np.int64)
    for length in (1000, 32_768):
        work.fill(np.array([length]), one, one, kv_heads=8, queries_per_kv=2, sms=132)
        items = int(work.host_arrays().counts[1]) * 8
        assert 0.9 * 132 < items <= 2 * 132
    lengths = np.random.default_rng(0).integers(200, 1900, 256)
    work.fill(lengths, np.arange(256), np.zeros(256, np.int64), kv_heads=8, queries_per_kv=2, sms=132)
    spans = np.diff(work.host_arrays().items_I[:, 3:], axis=1)
    assert spans.mean() > 300
    # Programs that take items in turn, there and back again, read alike.
    units, programs = np.repeat(spans, 8), 3 * 132
    rounds = np.append(units, np.zeros(-len(units) % programs, int)).reshape(-1, programs)
    rounds[1::2] = rounds[1::2, ::-1]
    assert rounds.sum(0).max() < 1.06 * rounds.sum(0).mean()


def test_pieces_are_made_longer_until_the_results_fit():
    work = made(4, 8)
    lengths = np.array([30_000, 20_000, 10_000, 70])
    work.fill(lengths, np.array([1, 1, 1, 1]), np.array([0, 64, 64, 64]), kv_heads=1, queries_per_kv=1, sms=132)
    check(work, lengths, most=64)
    assert work.host_arrays().base_B[-1] == 8


@given(
    st.lists(st.lists(st.integers(0, 20), min_size=5, max_size=5), min_size=1, max_size=6),
    st.booleans(),
    st.sampled_from([{}, {"window": 90}, {"chunk": 128}]),
)
@settings(max_examples=examples(60), deadline=None)
def test_rows_that_grow_keep_their_pieces(steps, leaves_one, reach):
    work = made()
    lengths, shared, group = np.array([200, 64, 300, 300, 0]), np.array([0, 0, 128, 128, 0]), np.array([0, 1, 2, 2, 3])
    for more in ([0] * 5, *steps):
        lengths = lengths + np.array(more) * (lengths > 0)
        if leaves_one and sum(more) > 60:
            lengths, shared, group = lengths[1:], shared[1:], group[1:]
            leaves_one = False
            lengths = np.append(lengths, 7)
            shared, group = np.append(shared, 0), np.append(group, 9)
        work.fill(lengths, group, shared, kv_heads=2, queries_per_kv=2, sms=132, **reach)
        check(work, lengths, most=32, **reach)


def test_what_was_sent_is_on_the_device_and_three_steps_do_not_disturb_one_another():
    work, zero = made(), np.zeros(2, np.int64)
    asked = {"kv_heads": 1, "queries_per_kv": 1, "sms": 1}
    work.fill(np.array([70, 500]), zero, zero, **asked)
    lists = work.host_arrays()
    before = [array.copy() for array in lists]
    work.copy_to_device()
    for device, host in zip((work.counts, work.length_B, work.base_B), lists, strict=False):
        assert device.tolist() == host.tolist()
    assert work.items_I[: len(lists.items_I)].tolist() == lists.items_I.tolist()
    work.fill(np.array([9, 9]), zero, zero, **asked)
    work.fill(np.array([3, 3]), zero, zero, **asked)
    for array, kept in zip(lists, before, strict=True):
        assert array.tolist() == kept.tolist()


def test_no_rows_at_all_are_no_items():
    work, none = made(), np.zeros(0, np.int64)
    for lengths in (none, np.zeros(3, np.int64)):
        work.fill(lengths, lengths, lengths, kv_heads=8, queries_per_kv=2, sms=132)
        assert check(work, lengths, most=1) == [] and not work.host_arrays().base_B.any()
