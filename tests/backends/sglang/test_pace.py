"""A server that writes slower than the others is named, by what it wrote and not by how much it was given."""

import asyncio

import numpy as np
import pytest
from tests.backends.sglang.near import DRAWN, PROMPT, stand, url_of

from miles.backends.sglang import fleet as fleets
from miles.backends.sglang.pace import Pace
from miles.cluster.slow import LOOKS


def test_a_server_that_stays_behind_is_named_once_however_little_it_was_given():
    pace, said = Pace(1.5), []
    pace.tell = (said.append,)
    for version in range(4 * LOOKS):
        for name, seconds, replies in (("engine 0", 1.0, 20), ("engine 1", 2.5, 8), ("engine 2", 1.1, 20)):
            for _ in range(replies):
                pace.note(name, 50, 50 * seconds, serving=["engine 0", "engine 1", "engine 2"], version=version)
    assert said == ["engine 1 takes 2.4 times the median of the others since version 0."]


def test_a_server_alone_or_one_that_is_gone_is_compared_with_nobody():
    pace = Pace(1.5)
    pace.tell = (pytest.fail,)
    for number in range(200):
        pace.note("engine 0", 10, 1.0, serving=["engine 0"], version=number)
        pace.note("engine 0", 10, 1.0, serving=["engine 0", "engine 1"], version=number)
        pace.note("engine 1", 0, 100.0, serving=["engine 0", "engine 1"], version=number)


def test_a_fleet_notes_every_reply_with_the_server_that_gave_it(pair, folders, monkeypatch):
    noted: list[tuple[str, int]] = []

    class Heard(Pace):
        def note(self, name, tokens, seconds, *, serving, version):
            assert serving == ["engine 0", "engine 1"] and version == 0 and seconds > 0
            noted.append((name, tokens))

    monkeypatch.setattr(fleets, "Pace", Heard)

    async def run():
        async with stand(folders.a, [url_of(hosted) for hosted in pair]) as made:
            prompts = [np.append(PROMPT, number).astype(np.int32) for number in range(6)]
            await asyncio.gather(*(made.fleet.generate(prompt, DRAWN) for prompt in prompts))

    asyncio.run(run())
    assert len(noted) == 6 and {tokens for _, tokens in noted} == {DRAWN.max_new_tokens}
    assert {name for name, _ in noted} == {"engine 0", "engine 1"}
