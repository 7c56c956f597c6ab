"""Order of the sample buffer, against a linear search over all that wait."""

import asyncio
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from miles.core.types import Group, Prompt, Version
from miles.schedule.reorder_buffer import FinishedGroup, ReorderBuffer


def finished(ticket: int, kept: bool) -> FinishedGroup:
    group = Group(prompt=Prompt(id=ticket, messages=[]), trajectories=())
    return FinishedGroup(ticket=ticket, group=group, samples=() if kept else None, reason="")


def last(waiting: Sequence[Group], version: Version) -> int:
    return len(waiting) - 1


def expected(done: dict[int, bool], first: int, window: int, chooses: bool) -> int | None:
    """By looking at each."""
    within = sorted(t for t in done if t < first + window)
    if not chooses or not within:
        return next(iter(within), None)
    dropped = [t for t in within if not done[t]]
    return dropped[0] if dropped else within[-1]


@given(
    order=st.permutations(range(14)),
    fate=st.lists(st.booleans(), min_size=14, max_size=14),
    takes=st.lists(st.integers(0, 4), min_size=14, max_size=14),
    window=st.integers(1, 20),
    chooses=st.booleans(),
    passed=st.sets(st.integers(0, 13), max_size=3),
)
def test_the_next_in_line_is_who_a_look_at_all_of_them_finds(order, fate, takes, window, chooses, passed):
    async def run() -> None:
        shelf = ReorderBuffer(window=window, data_buffer=last if chooses else None)
        done: dict[int, bool] = {}
        gone: set[int] = set()
        for ticket, count in zip(order, takes, strict=True):
            if ticket in passed:
                shelf.skip(ticket)
                gone.add(ticket)
            else:
                shelf.put(finished(ticket, fate[ticket]))
                done[ticket] = fate[ticket]
            for _ in range(count):
                first = next(t for t in range(15) if t not in gone)
                wanted = expected(done, first, window, chooses)
                if wanted is None:
                    break
                assert (await asyncio.wait_for(shelf.take(), 1)).ticket == wanted
                del done[wanted]
                gone.add(wanted)
        assert [f.ticket for f in shelf.drain()] == sorted(done)

    asyncio.run(run())
