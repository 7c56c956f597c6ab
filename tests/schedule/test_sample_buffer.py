"""Groups that wait are chosen among, within the window, and asked for once more in their turn."""

import asyncio

import numpy as np
import pytest

from miles.core.errors import HookError
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.schedule.reorder_buffer import FinishedGroup, ReorderBuffer, choose_group, freshest


def group(number: int, version: int = 0) -> Group:
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    wrote = Span(
        author=Author.POLICY,
        tokens=np.array([2], np.int32),
        logprobs=np.zeros(1, np.float32),
        version=Version(number=version),
    )
    trajectory = Trajectory(branches=((asked, wrote),), status=Status.COMPLETED, reward=Reward(value=0.0))
    return Group(prompt=Prompt(id=number, messages=[]), trajectories=(trajectory,))


def finished(ticket: int, *, kept: bool = True, version: int = 0) -> FinishedGroup:
    return FinishedGroup(ticket=ticket, group=group(ticket, version), samples=[] if kept else None, reason="")


def test_the_freshest_comes_first_and_of_several_the_one_asked_for_first():
    assert freshest([group(0, 1), group(1, 3), group(2, 3)], Version(number=4)) == 1


def test_only_groups_of_the_window_are_shown_and_every_one_comes_in_the_end():
    async def taken() -> list[int]:
        seen: list[int] = []

        def last(waiting, version) -> int:
            seen.append(len(waiting))
            assert version == Version(number=9)
            return len(waiting) - 1

        buffer = ReorderBuffer(window=3, data_buffer=last)
        for ticket in range(6):
            buffer.put(finished(ticket))
        order = [(await buffer.take(Version(number=9))).ticket for _ in range(6)]
        assert max(seen) == 3
        return order

    order = asyncio.run(taken())
    assert sorted(order) == list(range(6)) and order[0] == 2
    assert all(ticket - done <= 2 for done, ticket in enumerate(order))


def test_what_was_dropped_does_not_wait_to_be_chosen():
    async def taken() -> list[int]:
        buffer = ReorderBuffer(window=3, data_buffer=lambda waiting, version: len(waiting) - 1)
        for ticket, kept in enumerate((True, False, True)):
            buffer.put(finished(ticket, kept=kept))
        return [(await buffer.take()).ticket for _ in range(3)]

    assert asyncio.run(taken())[0] == 1


@pytest.mark.parametrize("answer", [-1, 1, None, "first"])
def test_a_choice_that_is_none_of_those_that_wait_is_refused(answer):
    with pytest.raises(HookError, match="for 1 waiting groups; return an index from 0 to 0"):
        choose_group(lambda waiting, version: answer, [group(0)], Version())
