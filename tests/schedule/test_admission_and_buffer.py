"""Admission control and sample buffer: the staleness bound, whatever order groups finish in."""

import asyncio
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tiers import examples

from miles.core.types import Group, Prompt, Sample, Version
from miles.schedule.admission import AdmissionControl, compute_admission_slots
from miles.schedule.loop import Interval
from miles.schedule.reorder_buffer import FinishedGroup, ReorderBuffer


def finished(ticket: int, kept: bool = True) -> FinishedGroup:
    group = Group(prompt=Prompt(id=ticket, messages=[]), trajectories=())
    return FinishedGroup(ticket=ticket, group=group, samples=() if kept else None, reason="")


async def at_once(coroutine):
    """What ``coroutine`` gives without waiting, or None."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    if task.done():
        return task.result()
    task.cancel()
    return None


def test_a_gate_lets_in_no_more_than_it_has_places():
    async def scenario():
        gate = AdmissionControl(slots=2, needed=9)
        assert [await at_once(gate.admit()) for _ in range(3)] == [0, 1, None]
        gate.release(1)
        assert [await at_once(gate.admit()) for _ in range(2)] == [2, None]
        gate.drop()
        assert await at_once(gate.admit()) == 3

    asyncio.run(scenario())


def test_a_gate_stops_when_the_run_needs_no_more_groups():
    async def scenario():
        gate = AdmissionControl(slots=8, needed=3)
        assert [await at_once(gate.admit()) for _ in range(4)] == [0, 1, 2, None]
        gate.drop()  # one was thrown away: one more is wanted
        assert [await at_once(gate.admit()) for _ in range(2)] == [3, None]

    asyncio.run(scenario())


def test_a_gate_passes_over_what_an_earlier_life_distributed_with():
    async def scenario():
        gate = AdmissionControl(slots=8, needed=8, first=10, skip=(11, 12, 14))
        assert [await at_once(gate.admit()) for _ in range(4)] == [10, 13, 15, 16]

    asyncio.run(scenario())


@settings(deadline=None, max_examples=examples(200))
@given(st.permutations(range(12)))
def test_a_shelf_of_window_one_hands_on_in_ticket_order(order):
    async def scenario():
        shelf = ReorderBuffer()
        for ticket in order:
            shelf.put(finished(ticket))
        assert [(await shelf.take()).ticket for _ in order] == list(range(12))
        assert shelf.cursor == (12, ())

    asyncio.run(scenario())


def test_a_wider_shelf_lets_few_overtake_and_remembers_who():
    async def scenario():
        shelf = ReorderBuffer(window=3, first=5)
        shelf.put(finished(7))
        shelf.put(finished(8))
        assert (await shelf.take()).ticket == 7
        assert shelf.cursor == (5, (7,))
        assert await at_once(shelf.take()) is None  # 8 may not overtake 5: it is three places behind
        shelf.put(finished(5))
        assert [(await shelf.take()).ticket for _ in range(2)] == [5, 8]
        assert shelf.cursor == (6, (7, 8))

    asyncio.run(scenario())


def test_a_shelf_shows_a_few_rows_that_one_version_alone_wrote():
    def row(*numbers: int) -> Sample:
        zeros = np.zeros(len(numbers), np.float32)
        return Sample(
            prompt_id=0,
            trajectory=0,
            tokens=np.zeros(len(numbers), np.int32),
            mask=np.array(numbers) >= 0,
            logprobs=zeros,
            advantages=zeros,
            versions=np.array(numbers, np.int32),
        )

    shelf = ReorderBuffer()
    group = finished(0).group
    shelf.put(FinishedGroup(ticket=0, group=group, samples=(row(-1, 3, 3), row(-1, 2, 3)), reason="kept"))
    shelf.put(FinishedGroup(ticket=1, group=group, samples=(row(-1, 3), row(-1, 3)), reason="kept"))
    shelf.put(FinishedGroup(ticket=2, group=group, samples=None, reason="dropped"))
    assert [len(one) for one in shelf.select_fresh(Version(number=3), 2)] == [3, 2]
    assert shelf.select_fresh(Version(number=4), 2) == ()
    assert shelf.cursor == (0, ()), "looking takes nothing"


@settings(deadline=None, max_examples=examples(300))
@given(groups=st.integers(1, 5), k=st.integers(0, 3), steps=st.integers(1, 6), fate=st.integers(0, 2**32))
def test_no_group_is_trained_on_more_than_k_versions_late_in_any_order(groups, k, steps, fate):
    """The gate and shelf alone, against an adversary who picks who finishes next and who is dropped."""
    draw = random.Random(fate)
    window = draw.randint(1, k * groups + 1)

    async def scenario():
        gate = AdmissionControl(
            slots=compute_admission_slots(groups_per_step=groups, max_staleness=k, window=window), needed=steps * groups
        )
        shelf, born, inside = ReorderBuffer(window=window), {}, []
        for version in range(steps):
            kept = 0
            while kept < groups:
                while (ticket := await at_once(gate.admit())) is not None:
                    born[ticket] = version
                    inside.append(ticket)
                if (taken := await at_once(shelf.take())) is None:
                    ticket = inside.pop(draw.randrange(len(inside)))
                    keep = draw.random() < 0.7
                    shelf.put(finished(ticket, keep))
                    if not keep:
                        gate.drop()
                    continue
                if taken.samples is not None:
                    kept += 1
                    assert version - born[taken.ticket] <= k
            gate.release(groups)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("cadence", "due"),
    [
        (Interval(every=2), [2, 4]),
        (Interval(every=None), []),
        (Interval(every=None, at_end=True), [5]),
        (Interval(every=2, at_start=True, at_end=True), [0, 2, 4, 5]),
        (Interval(every=5), [5]),
    ],
)
def test_a_cadence_is_due_when_it_says(cadence, due):
    assert [step for step in range(6) if cadence.due(step, last=5)] == due
