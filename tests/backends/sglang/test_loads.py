"""What does not grow with the number of servers or tokens, held against a look at each of them."""

import asyncio
import math
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from miles.backends.sglang.client import Client
from miles.backends.sglang.fleet import Fleet, Seat
from miles.backends.sglang.loads import Loads
from miles.backends.sglang.reply import Reply, Unfit
from miles.core.types import Version


@dataclass(eq=False)
class Bearer:
    load: int = 0
    open: bool = True


@given(st.integers(1, 9), st.lists(st.tuples(st.integers(0, 8), st.sampled_from("+-oc")), max_size=400))
def test_the_least_loaded_is_who_a_look_at_all_of_them_finds(count, moves):
    everyone = [Bearer() for _ in range(count)]
    loads = Loads[Bearer]()
    for bearer in everyone:
        loads.note(bearer)
    for number, move in moves:
        bearer = everyone[number % count]
        if move in "+-":
            bearer.load = max(0, bearer.load + (1 if move == "+" else -1))
            loads.note(bearer)
        else:
            bearer.open = move == "o"
            if bearer.open:
                loads.note(bearer)
        open_ = [b for b in everyone if b.open]
        assert loads.least() is (min(open_, key=lambda b: b.load) if open_ else None)
        assert len(loads._heap) <= 4 * count + 65


ODD = st.sampled_from([True, None, -1, 50, 7.0, "7", [], math.nan, math.inf, 0.5, 0, -3])
LINE = st.one_of(st.tuples(st.floats(-9, 0), st.integers(0, 49), st.none()).map(list), st.lists(ODD, max_size=3), ODD)


@given(st.lists(st.tuples(st.one_of(st.integers(0, 49), ODD), LINE), min_size=1, max_size=6))
def test_a_glance_at_all_tokens_believes_what_a_look_at_each_does(pairs):
    tokens, lines = [token for token, _ in pairs], [line for _, line in pairs]
    reply = Reply(vocabulary=50, limit=64)
    try:
        each = [reply._logprob(token, line) for token, line in pairs]
    except Unfit:
        each = None
    glance = reply._as_it_should_be(tokens, lines)
    assert glance is None or glance == each


def test_what_is_right_is_seen_at_a_glance():
    reply = Reply(vocabulary=50, limit=64)
    assert reply._as_it_should_be([1, 2], [[-0.5, 1, None], [-0.25, 2, None]]) == [-0.5, -0.25]


class Looked(Fleet):
    """Counts how often a request looks for a server."""

    looks = 0

    @property
    def _holds(self) -> int:
        self.looks += 1
        return self.__dict__["holds"]

    @_holds.setter
    def _holds(self, value: int) -> None:
        self.__dict__["holds"] = value


def test_requests_sleep_while_everyone_holds_still_and_are_shared_out_after():
    async def run() -> None:
        fleet = Looked([f"engine {i}" for i in range(64)], ends=frozenset())
        client = Client("http://nowhere", "engine", vocabulary=10)
        fleet._holds = 1
        waiting = [asyncio.create_task(chosen(fleet, i)) for i in range(128)]
        await asyncio.sleep(0)
        before = fleet.looks
        for seat in fleet.seats:
            fleet.admit(seat, client, Version())
        for _ in range(3):
            await asyncio.sleep(0)
        assert fleet.looks <= before + 2 * len(fleet.seats), "each word woke every request"
        fleet._holds = 0
        fleet.told()
        seats = await asyncio.gather(*waiting)
        assert {seats.count(seat) for seat in fleet.seats} == {2}

    asyncio.run(run())


async def chosen(fleet: Fleet, number: int) -> Seat:
    seat = await fleet._choose(hash(np.array([number], np.int32).tobytes()), set())
    fleet._bear(seat, +1)
    return seat
