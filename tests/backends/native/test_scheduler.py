"""The scheduler alone, over a cache that remembers for which prefix each slot and each seat's state was written."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.backends.native.cache import Pages
from miles.backends.native.request import Seats, Sequence
from miles.backends.native.scheduler import Plan, Scheduler
from miles.core.protocols import Sampling
from miles.core.types import Version


class World:
    """A scheduler whose forward pass writes down prefixes instead of keys, values and states.

    A model with states (``recurrent``) shares no page, only what a leader has just computed.
    """

    def __init__(self, *, pages=8, size=4, seats=6, chunk=7, share=True, recurrent=False):
        self.scheduler = Scheduler(
            Pages(pages, size, share=share and not recurrent),
            Seats(seats, pages),
            prefill_chunk=chunk,
            lead=share,
            decode=None,
        )
        self.recurrent = recurrent
        self.states = [None] * seats
        self.size = size
        self.slots = [None] * (pages * size)
        self.numbers = count()
        self.version = Version()
        self.born = {}
        self.ended = []

    def submit(self, prompt, new):
        sequence = Sequence(
            number=next(self.numbers),
            prompt_length=len(prompt),
            key=np.array(prompt).tobytes(),
            sampling=Sampling(max_new_tokens=new),
            ends=frozenset(),
            tail=0,
            tokens=list(prompt),
        )
        self.scheduler.submit(sequence)
        self.born[sequence] = self.version.number
        return sequence

    def publish(self):
        self.version = self.version.next()
        self.scheduler.pages.flush()

    def submit_many(self, prompt, new, copies):
        for _ in range(copies):
            self.submit(prompt, new)

    def abort(self, which):
        alive = list(self.scheduler.everyone())
        if alive:
            self.scheduler.remove(alive[which % len(alive)])

    def sleep(self):
        for sequence in list(self.scheduler.running):
            self.scheduler.preempt(sequence)
        self.scheduler.pages.flush()
        self.slots = [None] * len(self.slots)
        self.states = [None] * len(self.states)

    def steps(self, most):
        for _ in range(most):
            if self.scheduler.running or self.scheduler.waiting:
                self.step()

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        before = list(self.slots)
        for target, source in plan.copies.items():
            span = slice(target * self.size, (target + 1) * self.size)
            self.slots[span] = before[source * self.size : (source + 1) * self.size]
        states = list(self.states)
        for target, source in plan.seat_copies.items():
            self.states[target] = states[source]
        for sequence, length in plan.work:
            if self.recurrent:
                self.advance(sequence, length)
            for position in range(sequence.computed, sequence.computed + length):
                self.slots[self.slot(sequence, position)] = (
                    tuple(sequence.tokens[: position + 1]),
                    self.version.number,
                )
        for sequence, length in plan.work:
            self.look(sequence, sequence.computed + length)
        tokens = [self.draw(sequence) for sequence in plan.draws]
        self.ended += self.scheduler.absorb(plan, tokens, [0.0] * len(tokens), self.version, None)
        self.audit()
        return plan

    def advance(self, sequence, length):
        """A state goes on from exactly the tokens before, or from nothing."""
        known = self.states[sequence.seat] if sequence.computed else []
        assert known == sequence.tokens[: sequence.computed]
        self.states[sequence.seat] = sequence.tokens[: sequence.computed + length]

    def draw(self, sequence):
        """A function of what came before, as of a model, and nearly always 0, so that prefixes coincide."""
        return int(hash(tuple(sequence.tokens)) % 11 == 0)

    def slot(self, sequence, position):
        page = int(self.scheduler.seats.pages_SP[sequence.seat, position // self.size])
        assert page == sequence.pages[position // self.size]
        return page * self.size + position % self.size

    def look(self, sequence, context):
        """Every slot a query sees was written for exactly this prefix, and not under weights older than the request."""
        for position in range(context):
            prefix, number = self.slots[self.slot(sequence, position)]
            assert prefix == tuple(sequence.tokens[: position + 1])
            assert number >= self.born[sequence]

    def audit(self):
        scheduler = self.scheduler
        scheduler.pages.check([page for sequence in scheduler.running for page in sequence.pages])
        seated = [one for sequence in scheduler.running for one in (sequence, *sequence.followers)]
        assert sorted({one.seat for one in seated}) == sorted(one.seat for one in seated)
        assert scheduler.seats.free + len(seated) == len(scheduler.seats.seed_S)
        assert [s.number for s in scheduler.running] == sorted(s.number for s in scheduler.running)
        assert [s.number for s in scheduler.waiting] == sorted(s.number for s in scheduler.waiting)

    def drain(self):
        self.steps(5000)
        assert not list(self.scheduler.everyone())
        assert self.scheduler.pages.available == self.scheduler.pages.total


PROMPTS = st.one_of(
    st.integers(1, 12).map(lambda length: [0] * length), st.lists(st.integers(0, 1), min_size=1, max_size=12)
)
ACTIONS = st.one_of(
    st.tuples(st.just("submit_many"), PROMPTS, st.integers(1, 15), st.integers(1, 5)),
    st.tuples(st.just("steps"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("sleep")),
)


@given(
    st.lists(ACTIONS, min_size=5, max_size=30),
    st.sampled_from([1, 3, 4]),
    st.sampled_from([2, 5, 40]),
    st.integers(1, 8),
    st.sampled_from([28, 60]),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
)
@settings(max_examples=200, deadline=None)
def test_whatever_comes_no_page_leaks_and_nobody_sees_a_slot_or_a_state_that_is_not_of_its_own_prefix(
    actions, size, chunk, seats, room, share, recurrent
):
    world = World(pages=room // size, size=size, seats=seats, chunk=chunk, share=share, recurrent=recurrent)
    for verb, *how in actions:
        getattr(world, verb)(*how)
        world.audit()
    world.drain()
    for sequence in world.ended:
        assert len(sequence.tokens) == sequence.prompt_length + sequence.sampling.max_new_tokens
        assert len(sequence.logprobs) == sequence.sampling.max_new_tokens


@pytest.mark.parametrize("recurrent", [False, True])
def test_samples_of_one_prompt_submitted_together_compute_it_once(recurrent):
    world = World(pages=60, seats=9, chunk=100, recurrent=recurrent)
    for _ in range(8):
        world.submit(range(11), new=5)
    plan = world.step()
    assert [(one.number, length) for one, length in plan.work] == [(0, 11)]
    assert len(plan.draws) == 8
    world.drain()
    done = world.scheduler.counters
    assert done.prefilled_tokens == 11
    assert done.cached_tokens == 7 * 11
    assert done.steps == 5
    assert sorted(one.cached_tokens for one in world.ended) == [0] + [11] * 7


def test_a_late_sample_of_a_prompt_whose_state_has_moved_on_computes_all_of_it():
    world = World(pages=60, seats=9, chunk=100, recurrent=True)
    world.submit(range(11), new=5)
    world.step()
    late = world.submit(range(11), new=5)
    world.drain()
    assert late.cached_tokens == 0
    assert world.scheduler.counters.prefilled_tokens == 22


def test_a_late_sample_of_a_prompt_computes_only_its_last_token():
    for length in (11, 12, 13):  # a page that is not full, one that is, and a single token on its own
        world = World(pages=60, seats=9, chunk=100)
        world.submit(range(length), new=5)
        world.step()
        late = world.submit(range(length), new=5)
        world.drain()
        assert late.cached_tokens == length - 1
        assert world.scheduler.counters.prefilled_tokens == length + 1


def test_different_prompts_share_the_pages_they_begin_with_even_within_one_step():
    world = World(pages=60, seats=9, chunk=100)
    world.submit([*range(9), 100], new=2)
    world.submit([*range(9), 200], new=2)
    plan = world.step()
    assert [length for _, length in plan.work] == [2, 10]
    assert world.scheduler.counters.cached_tokens == 8
    world.drain()


def test_a_prompt_that_is_a_full_page_of_one_just_being_computed_does_not_copy_it_too_early():
    world = World(pages=60, seats=9, chunk=100)
    world.submit(range(10), new=2)
    world.submit(range(8), new=2)
    world.drain()
    assert world.scheduler.counters.cached_tokens == 4


def test_without_a_prefix_cache_nothing_is_shared():
    world = World(pages=60, seats=9, chunk=100, share=False)
    for _ in range(4):
        world.submit(range(11), new=3)
    world.drain()
    assert world.scheduler.counters.prefilled_tokens == 44
    assert world.scheduler.counters.cached_tokens == 0


def test_a_prompt_longer_than_a_chunk_is_computed_in_pieces_beside_the_running():
    world = World(pages=60, seats=9, chunk=5)
    first = world.submit(range(3), new=20)
    world.step()
    world.submit(range(50, 61), new=2)
    lengths = []
    for _ in range(3):
        lengths.append([length for _, length in world.step().work])
    assert lengths == [[1, 5], [1, 5], [1, 1]]
    assert world.scheduler.counters.prefilled_tokens == 3 + 11
    assert first in world.scheduler.running
    world.drain()


def test_when_pages_run_out_the_latest_arrival_makes_room_and_comes_back_with_its_tokens():
    world = World(pages=6, size=4, seats=4, chunk=100)
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
    assert world.scheduler.counters.preemptions > 0


def test_requests_written_under_an_older_version_leave_nothing_for_newer_ones():
    world = World(pages=60, seats=9, chunk=4)
    world.submit(range(10), new=9)
    world.step()
    world.publish()
    late = world.submit(range(10), new=9)
    world.drain()
    assert late.cached_tokens == 0


def test_a_page_begun_under_an_older_version_and_filled_under_a_newer_one_is_not_shared():
    world = World(pages=60, seats=9)
    first = world.submit([7, 7], new=9)
    world.step()
    world.publish()
    for _ in range(3):
        world.step()
    late = world.submit(first.tokens[:5], new=3)
    world.drain()
    assert late.cached_tokens == 0
