"""The scheduler with a simulated device that stores for which prefix each cache location and state was written."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.simulated_device import IMAGE_TOKENS, World
from tests.tiers import examples

PROMPTS = st.one_of(
    st.integers(1, 12).map(lambda length: [0] * length),
    st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.lists(st.sampled_from([0, 1, *IMAGE_TOKENS]), min_size=1, max_size=4),
)
ACTIONS = st.one_of(
    st.tuples(
        st.just("submit_many"),
        PROMPTS,
        st.integers(0, 15),
        st.integers(1, 5),
        st.sampled_from([0, 0, 0, 1, -1]),
        st.sampled_from([None, None, None, 0, 3, 12]),
        st.sampled_from([False, False, False, True]),
    ),
    st.tuples(st.just("steps"), st.integers(1, 4)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("retract")),
    st.tuples(st.just("sleep")),
)


@pytest.mark.parametrize("depth", [0, 1, 2])
@given(
    st.lists(ACTIONS, min_size=5, max_size=30),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([2, 5, 40]),
    st.integers(1, 8),
    st.sampled_from([28, 60]),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
    st.sampled_from([0, 0, 3]),
    st.sampled_from([(0, 1), (1, 1), (5, 1), (6, 3)]),
)
@settings(max_examples=examples(150), deadline=None)
def test_whatever_comes_no_page_leaks_and_nobody_sees_a_slot_or_a_state_that_is_not_of_its_own_prefix(
    depth, actions, size, chunk, num_slots, room, share, recurrent, patience, drafts
):
    sizes = {"pages": room // size, "size": size, "num_slots": num_slots, "chunk": chunk}
    draft_tokens, num_branches = drafts
    world = World(
        **sizes,
        share=share,
        recurrent=recurrent,
        depth=depth,
        prefill_delay=patience,
        draft_tokens=draft_tokens,
        num_branches=num_branches,
        adaptive=num_branches == 1,
    )
    for verb, *how in actions:
        getattr(world, verb)(*how)
        world.scheduler.check()
    world.drain()


@pytest.fixture(params=[0, 1], ids=["at once", "overlapped"])
def made(request):
    """Worlds of both kinds."""

    def make(**how):
        return World(depth=request.param, **how)

    return make


def lengths(step):
    return step.batch.counts_B.tolist()


@pytest.mark.parametrize("recurrent", [False, True])
def test_samples_of_one_prompt_submitted_together_compute_it_once(made, recurrent):
    world = made(pages=60, num_slots=9, chunk=100, recurrent=recurrent)
    for _ in range(8):
        world.submit(range(11), new=5)
    step = world.step()
    assert lengths(step) == [11]
    assert step.batch.rows_D.tolist() == [10] * 8
    assert len(step.sampled_reqs) == 8
    world.drain()
    done = world.scheduler.counters
    assert done.prefilled_tokens == 11
    assert done.cached_tokens == 7 * 11
    assert done.steps == 5
    assert sorted(one.cached_tokens for one in world.ended) == [0] + [11] * 7


def test_samples_of_a_prompt_are_neighbours_that_share_its_full_pages(made):
    world = made(pages=90, num_slots=20, chunk=100)
    for prompt in (range(11), range(20, 33), range(40, 43)):
        for _ in range(3):
            world.submit(prompt, new=5)
    lone = world.submit(range(60, 70), new=5)
    world.step()
    batch = world.step().batch
    shares = [(int(a), int(b)) for a, b in zip(batch.group_B, batch.shared_B, strict=True)]
    assert sorted(Counter(shares).values()) == [1, 1, 1, 1, 3, 3]
    assert sorted(shared for _, shared in shares) == [0] * 4 + [8] * 3 + [12] * 3
    assert batch.decode_only
    assert lone.slot == batch.req_slots_B[batch.shared_B == 0][-1] or lone.slot in batch.req_slots_B
    world.drain()


def test_a_late_sample_of_a_prompt_whose_state_has_moved_on_computes_all_of_it(made):
    world = made(pages=60, num_slots=9, chunk=100, recurrent=True)
    world.submit(range(11), new=5)
    world.step()
    late = world.submit(range(11), new=5)
    world.drain()
    assert late.cached_tokens == 0
    assert world.scheduler.counters.prefilled_tokens == 22


def test_a_late_sample_of_a_prompt_computes_only_its_last_token(made):
    for length in (11, 12, 13):  # a page that is not full, one that is, and a single token on its own
        world = made(pages=60, num_slots=9, chunk=100)
        world.submit(range(length), new=5)
        world.step()
        late = world.submit(range(length), new=5)
        world.drain()
        assert late.cached_tokens == length - 1
        assert world.scheduler.counters.prefilled_tokens == length + 1


def test_different_prompts_share_the_pages_they_begin_with_even_within_one_step(made):
    world = made(pages=60, num_slots=9, chunk=100)
    world.submit([*range(9), 100], new=2)
    world.submit([*range(9), 200], new=2)
    assert lengths(world.step()) == [2, 10]
    assert world.scheduler.counters.cached_tokens == 8
    world.drain()


def test_a_prompt_that_is_a_full_page_of_one_just_being_computed_does_not_copy_it_too_early(made):
    world = made(pages=60, num_slots=9, chunk=100)
    world.submit(range(10), new=2)
    world.submit(range(8), new=2)
    world.drain()
    assert world.scheduler.counters.cached_tokens == 4


def test_without_a_prefix_cache_nothing_is_shared(made):
    world = made(pages=60, num_slots=9, chunk=100, share=False)
    for _ in range(4):
        world.submit(range(11), new=3)
    world.drain()
    assert world.scheduler.counters.prefilled_tokens == 44
    assert world.scheduler.counters.cached_tokens == 0


def test_a_prompt_longer_than_a_chunk_is_computed_in_pieces_beside_the_running(made):
    world = made(pages=60, num_slots=9, chunk=5)
    first = world.submit(range(3), new=20)
    world.step()
    world.submit(range(50, 61), new=2)
    assert [lengths(world.step()) for _ in range(3)] == [[1, 5], [1, 5], [1, 1]]
    assert world.scheduler.counters.prefilled_tokens == 3 + 11
    assert first in world.scheduler.running
    world.drain()


def test_when_pages_run_out_the_latest_arrival_makes_room_and_comes_back_with_its_tokens(made):
    world = made(pages=6, size=4, num_slots=4, chunk=100)
    old, new = world.submit([1, 2, 3], new=18), world.submit([4, 5, 6], new=18)
    kept = []
    while not world.ended:
        world.step()
        if new in world.scheduler.waiting and not kept:
            kept = list(new.tokens)
    assert world.ended == [old]
    assert len(kept) > 3
    world.drain()
    assert new.tokens[: len(kept)] == kept
    assert world.scheduler.counters.preemptions == new.preemptions > 0


def test_a_higher_priority_goes_first_among_those_who_wait_and_last_among_those_who_must_go(made):
    world = made(pages=6, size=4, num_slots=1, chunk=100)
    low, equal, high = (world.submit([i], new=2, priority=p) for i, p in ((1, 0), (2, 0), (3, 5)))
    world.drain()
    assert world.ended == [high, low, equal]
    world = made(pages=6, size=4, num_slots=4, chunk=100)
    high, low = (world.submit([i, 1, 1], new=18, priority=p) for i, p in ((1, 0), (2, -1)))
    urgent = world.submit([3, 1, 1], new=18, priority=1)
    world.drain()
    assert urgent.preemptions == 0
    assert world.ended[0] is urgent
    assert low.preemptions >= high.preemptions


def test_requests_written_under_an_older_version_leave_nothing_for_newer_ones(made):
    world = made(pages=60, num_slots=9, chunk=100)
    world.submit(range(10), new=9)
    world.step()
    world.publish()
    late = world.submit(range(10), new=9)
    world.drain()
    assert late.cached_tokens == 0


def test_a_page_begun_under_an_older_version_and_filled_under_a_newer_one_is_not_shared(made):
    world = made(pages=60, num_slots=9)
    first = world.submit([7, 7], new=9)
    world.step()
    world.publish()
    for _ in range(3):
        world.step()
    world.process_inflight()
    late = world.submit(first.tokens[:5], new=3)
    world.drain()
    assert late.cached_tokens == 0


def test_a_scored_prompt_is_computed_from_the_scored_position_on_however_much_of_it_is_known(made):
    world = made(pages=60, num_slots=9, chunk=5)
    world.submit(range(20), new=3)
    world.drain()
    for logprob_start_len, cached in ((0, 0), (9, 8), (10, 8), (20, 19)):
        again = world.submit(range(20), new=3, logprob_start_len=logprob_start_len)
        world.drain()
        assert again.cached_tokens == cached
    alone = world.submit(range(20), new=0, logprob_start_len=1)
    world.drain()
    assert (alone.finish_kind, len(alone.prompt_logprobs), alone.logprobs) == ("length", 19, [])


def test_one_whose_draws_depend_on_the_last_lets_everything_land_first(made):
    world = made(pages=60, num_slots=9, chunk=100)
    world.submit(range(5), new=9)
    slow = world.submit(range(9), new=3, needs_last_token=True)
    while slow in world.scheduler.iter_reqs():
        world.step()  # which looks that nothing it has drawn is still in flight
    world.drain()
    assert world.scheduler.counters.steps in (9, 10)


def test_prompts_wait_for_one_another_while_recorded_steps_go_on(made):
    world = made(pages=90, num_slots=9, chunk=100, prefill_delay=3, min_running=2)
    for at in range(3):
        world.submit(range(10 * at, 10 * at + 5), new=30)
    assert lengths(world.step()) == [5] * 3  # nobody runs, so nobody waits
    assert world.step().batch.decode_only
    world.submit(range(50, 54), new=5)
    assert world.step().batch.decode_only
    world.submit(range(60, 66), new=5)
    assert world.step().batch.decode_only and world.step().batch.decode_only
    assert lengths(world.step()) == [1, 1, 1, 4, 6]
    assert world.step().batch.decode_only
    world.drain()


@pytest.mark.parametrize(
    ("running", "coming", "num_slots", "decode_only"),
    [
        (3, [4], 9, [True, True, True, False]),
        (1, [4], 9, [False]),  # few run
        (3, [4, 4, 4], 9, [False]),  # as many come as run
        (3, [50], 9, [False]),  # it fills half a step
        (3, [4, 60], 4, [True, True, True, False]),  # of two only one has a seat, and is short
    ],
)
def test_nobody_waits_where_it_saves_nothing(made, running, coming, num_slots, decode_only):
    world = made(pages=90, num_slots=num_slots, chunk=100, prefill_delay=3, min_running=2)
    for at in range(running):
        world.submit(range(10 * at, 10 * at + 5), new=30)
    world.step()
    for at, length in enumerate(coming):
        world.submit(range(100 * at + 100, 100 * at + 100 + length), new=5)
    assert [world.step().batch.decode_only for _ in decode_only] == decode_only
    world.drain()


def test_waiting_begins_when_there_is_a_seat(made):
    world = made(pages=90, num_slots=3, chunk=100, prefill_delay=3, min_running=2)
    for at in range(3):
        world.submit(range(10 * at, 10 * at + 5), new=6 if at == 0 else 30)
    world.submit(range(50, 54), new=5)
    plain = []
    while len(plain) < 2 or plain[-1]:
        plain.append(world.step().batch.decode_only)
    # The first reads prompts, five draw the rest of who ends first; then three more.
    assert plain[0] is False and len(plain) - 2 in (5 + 3, 5 + 3 + world.depth)
    world.drain()


def test_a_step_that_is_not_recorded_anyway_takes_prompts_along(made):
    world = made(pages=90, num_slots=9, chunk=8, prefill_delay=3, min_running=2)
    for at in range(3):
        world.submit(range(10 * at, 10 * at + 5), new=30)
    for _ in range(3):
        world.step()
    world.submit(range(100, 120), new=5)  # three steps of its own
    assert lengths(world.step())[-1] == 8
    world.submit(range(50, 51), new=5)
    assert lengths(world.step())[-1] == 8
    step = world.step()
    assert sorted(lengths(step)) == [1, 1, 1, 1, 4]
    world.drain()
