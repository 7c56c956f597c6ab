"""Questions to a crew are answered once each, whatever becomes of its workers, and none has more than its share."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.crew_answers import make, refuse

from miles.cluster.crew import asked as room
from miles.cluster.crew.asked import Crew, Hopeless, Lost
from miles.cluster.crew.near import Near, life_of


@asynccontextmanager
async def crew(how, *, workers=2, most=4):
    said = []
    homes = [Near(life_of(f"worker {i}", how, {"TOLD": "so"}), seconds=60.0) for i in range(workers)]
    made = Crew(homes, most=most, tell=said.append)
    try:
        yield made, homes, said
    finally:
        await made.close()


async def until(holds, seconds=60.0):
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.005)


def begun(folder: Path) -> list[str]:
    file = folder / "begun.txt"
    return file.read_text().split() if file.exists() else []


def who(answer: bytes) -> int:
    return int(answer.split()[-1])


def test_questions_are_shared_out_and_the_processes_end_with_the_crew(tmp_path):
    async def run():
        async with crew(partial(make, tmp_path)) as (made, homes, said):
            asked = [asyncio.create_task(made.ask(f"until:{i}".encode())) for i in range(8)]
            await until(lambda: len(begun(tmp_path)) == 8)  # more than one worker would take
            (tmp_path / "go").touch()
            answers = await asyncio.gather(*asked)
            pids = {home.pid for home in homes}
        return answers, pids, said

    answers, pids, said = asyncio.run(run())
    assert [answer.split()[0] for answer in answers] == [f"until:{i}".encode() for i in range(8)]
    assert sorted(map([who(a) for a in answers].count, pids)) == [4, 4] and not said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_killed_worker_was_asked_is_asked_elsewhere_and_the_rest_is_not_asked_twice(tmp_path):
    async def run():
        async with crew(partial(make, tmp_path)) as (made, homes, said):
            asked = [asyncio.create_task(made.ask(f"until:{i}".encode())) for i in range(8)]
            await until(lambda: len(begun(tmp_path)) == 8)
            os.kill(homes[0].pid, signal.SIGKILL)
            await until(lambda: len(begun(tmp_path)) == 12)  # its four, again
            (tmp_path / "go").touch()
            answers = await asyncio.gather(*asked)
            await until(lambda: len(made._shifts) == 2)  # it is back
        return answers, said

    answers, said = asyncio.run(run())
    assert [answer.split()[0] for answer in answers] == [f"until:{i}".encode() for i in range(8)]
    assert len(begun(tmp_path)) == 12
    assert said == ["worker 0 ended with SIGKILL; it is started again."]


def test_a_worker_that_is_lost_while_it_has_nothing_to_do_is_replaced(tmp_path):
    async def run():
        async with crew(partial(make, tmp_path), workers=1) as (made, homes, _):
            first = who(await made.ask(b"one"))
            os.kill(first, signal.SIGKILL)
            await until(lambda: homes[0].pid not in (first, None) and made._shifts)
            return first, who(await made.ask(b"two"))

    first, second = asyncio.run(run())
    assert first != second and begun(tmp_path) == ["one", "two"]


def test_a_question_that_ends_its_worker_is_tried_again_and_then_given_up(tmp_path):
    async def run():
        async with crew(partial(make, tmp_path)) as (made, _, _):
            assert (await made.ask(b"once:1")).startswith(b"once:1 by ")
            with pytest.raises(Lost, match=r"3 workers were lost over it, the last as worker . ended with SIGKILL"):
                await made.ask(b"die:2")
            assert (await made.ask(b"well:3")).startswith(b"well:3 by ")

    asyncio.run(run())
    assert begun(tmp_path) == ["once:1", "once:1", "die:2", "die:2", "die:2", "well:3"]


def test_a_worker_lets_go_of_what_nobody_waits_for(tmp_path):
    async def run():
        async with crew(partial(make, tmp_path), workers=1, most=2) as (made, _, said):
            first = who(await made.ask(b"well:0"))
            for i in range(3):  # more than it may have at once
                asked = asyncio.create_task(made.ask(f"wait:{i}".encode()))
                await until(lambda: len(begun(tmp_path)) == i + 2)  # noqa: B023
                asked.cancel()
            return first, who(await made.ask(b"well:1")), said

    first, last, said = asyncio.run(run())
    assert first == last and not said


def test_a_worker_that_cannot_let_go_is_ended_and_its_other_questions_do_not_count_that(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "_LETTING_GO", 0.2)
    monkeypatch.setattr(room, "_TRIES", 1)

    async def run():
        async with crew(partial(make, tmp_path), workers=1) as (made, _, said):
            held = asyncio.create_task(made.ask(b"spin:0"))
            await until(lambda: begun(tmp_path) == ["spin:0"])
            other = asyncio.create_task(made.ask(b"well:1"))
            await until(lambda: bool(made._shifts) and made._shifts[0].load == 2)
            held.cancel()
            return await other, said

    answer, said = asyncio.run(run())
    assert answer.startswith(b"well:1 by ")
    assert said == ["worker 0 went on with what nobody waits for, and was ended; it is started again."]


def test_workers_that_cannot_begin_are_given_up_and_say_why(monkeypatch):
    monkeypatch.setattr(room, "_FAILURES", 2)

    async def run():
        async with crew(refuse) as (made, _, _):
            await made.ask(b"anything")

    why = "worker 0 cannot begin: ValueError: nothing can be made here"
    with pytest.raises(Hopeless, match=f"no worker is left: {why}; {why.replace('0', '1')}"):
        asyncio.run(run())


class Fickle:
    """A home that loses what it has whenever it is told to, and counts what it has at once."""

    def __init__(self, name: str) -> None:
        self.name, self.has, self.most = name, set[int](), 0
        self.fails: asyncio.Future[str] | None = None

    async def open(self) -> None:
        self.fails, self.has = asyncio.get_running_loop().create_future(), set()

    async def ask(self, number: int, question: bytes) -> bytes:
        fails, has = self.fails, self.has  # of this life
        has.add(number)
        self.most = max(self.most, len(has))
        try:
            for _ in range(question[0] % 5):
                await asyncio.sleep(0)
                if fails.done():
                    raise Lost(fails.result())
        finally:
            has.discard(number)
        return question

    def cut(self, number: int) -> None: ...

    async def ended(self) -> str:
        return await asyncio.shield(self.fails)

    async def close(self) -> None: ...


@given(
    workers=st.integers(1, 4),
    most=st.integers(1, 3),
    questions=st.integers(1, 40),
    losses=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), max_size=2),
)
def test_every_question_is_answered_by_its_own_answer_and_no_worker_has_more_than_it_may(
    workers, most, questions, losses
):
    async def run():
        homes = [Fickle(f"worker {i}") for i in range(workers)]
        made = Crew(homes, most=most, tell=lambda _: None)
        asked = [asyncio.create_task(made.ask(bytes([i]))) for i in range(questions)]
        for when, which in sorted(losses):
            for _ in range(when):
                await asyncio.sleep(0)
            home = homes[which % workers]
            if home.fails is not None and not home.fails.done():
                home.fails.set_result("it was told to")
        answers = await asyncio.gather(*asked)
        assert all(shift.load == 0 for shift in made._shifts) and not made._waiting
        await made.close()
        return answers, homes

    answers, homes = asyncio.run(run())
    assert answers == [bytes([i]) for i in range(questions)]
    assert max(home.most for home in homes) <= most
