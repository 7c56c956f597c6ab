"""Each request of a worker pool is answered once, whatever happens to its workers, within their concurrency."""

import asyncio
import os
import re
import signal
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.workers.handlers import make, refuse

from miles.cluster.workers import pool as pool_module
from miles.cluster.workers.local import LocalWorker, build_worker_spec
from miles.cluster.workers.pool import AllWorkersLost, WorkerLost, WorkerPool


@asynccontextmanager
async def worker_pool(how, *, workers=2, most=4):
    said = []
    hosts = [LocalWorker(build_worker_spec(f"worker {i}", how, {"TOLD": "so"}), seconds=60.0) for i in range(workers)]
    made = WorkerPool(hosts, max_concurrency=most, log=said.append)
    try:
        yield made, hosts, said
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
        async with worker_pool(partial(make, tmp_path)) as (made, hosts, said):
            asked = [asyncio.create_task(made.call(f"until:{i}".encode())) for i in range(8)]
            await until(lambda: len(begun(tmp_path)) == 8)  # more than one worker would take
            (tmp_path / "go").touch()
            answers = await asyncio.gather(*asked)
            pids = {host.pid for host in hosts}
        return answers, pids, said

    answers, pids, said = asyncio.run(run())
    assert [answer.split()[0] for answer in answers] == [f"until:{i}".encode() for i in range(8)]
    assert sorted(map([who(a) for a in answers].count, pids)) == [4, 4] and not said
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_a_killed_worker_was_asked_is_asked_elsewhere_and_the_rest_is_not_asked_twice(tmp_path):
    async def run():
        async with worker_pool(partial(make, tmp_path)) as (made, hosts, said):
            asked = [asyncio.create_task(made.call(f"until:{i}".encode())) for i in range(8)]
            await until(lambda: len(begun(tmp_path)) == 8)
            os.kill(hosts[0].pid, signal.SIGKILL)
            await until(lambda: len(begun(tmp_path)) == 12)  # its four, again
            (tmp_path / "go").touch()
            answers = await asyncio.gather(*asked)
            await until(lambda: len(made._workers) == 2)  # it is back
        return answers, said

    answers, said = asyncio.run(run())
    assert [answer.split()[0] for answer in answers] == [f"until:{i}".encode() for i in range(8)]
    assert len(begun(tmp_path)) == 12
    (sentence,) = said
    assert re.fullmatch(r"worker 0 ended with SIGKILL[^;]*; it is restarted\.", sentence)


def test_a_worker_that_is_lost_while_it_has_nothing_to_do_is_replaced(tmp_path):
    async def run():
        async with worker_pool(partial(make, tmp_path), workers=1) as (made, hosts, _):
            first = who(await made.call(b"one"))
            os.kill(first, signal.SIGKILL)
            await until(lambda: hosts[0].pid not in (first, None) and made._workers)
            return first, who(await made.call(b"two"))

    first, second = asyncio.run(run())
    assert first != second and begun(tmp_path) == ["one", "two"]


def test_a_question_that_ends_its_worker_is_tried_again_and_then_given_up(tmp_path):
    async def run():
        async with worker_pool(partial(make, tmp_path)) as (made, _, _):
            assert (await made.call(b"once:1")).startswith(b"once:1 by ")
            with pytest.raises(WorkerLost, match=r"3 workers were lost with it, .* worker . ended with SIGKILL"):
                await made.call(b"die:2")
            assert (await made.call(b"well:3")).startswith(b"well:3 by ")

    asyncio.run(run())
    assert begun(tmp_path) == ["once:1", "once:1", "die:2", "die:2", "die:2", "well:3"]


def test_a_worker_lets_go_of_what_nobody_waits_for(tmp_path):
    async def run():
        async with worker_pool(partial(make, tmp_path), workers=1, most=2) as (made, _, said):
            first = who(await made.call(b"well:0"))
            for i in range(3):  # more than it may have at once
                asked = asyncio.create_task(made.call(f"wait:{i}".encode()))
                await until(lambda: len(begun(tmp_path)) == i + 2)  # noqa: B023
                asked.cancel()
            return first, who(await made.call(b"well:1")), said

    first, last, said = asyncio.run(run())
    assert first == last and not said


def test_a_worker_that_cannot_let_go_is_ended_and_its_other_questions_do_not_count_that(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "_CANCEL_SECONDS", 0.2)
    monkeypatch.setattr(pool_module, "_MAX_TRIES", 1)

    async def run():
        async with worker_pool(partial(make, tmp_path), workers=1) as (made, _, said):
            held = asyncio.create_task(made.call(b"spin:0"))
            await until(lambda: begun(tmp_path) == ["spin:0"])
            other = asyncio.create_task(made.call(b"well:1"))
            await until(lambda: bool(made._workers) and made._workers[0].load == 2)
            held.cancel()
            return await other, said

    answer, said = asyncio.run(run())
    assert answer.startswith(b"well:1 by ")
    assert said == ["worker 0 did not stop a cancelled request and was ended; it is restarted."]


def test_workers_that_cannot_begin_are_given_up_and_say_why(monkeypatch):
    monkeypatch.setattr(pool_module, "_MAX_FAILURES", 2)

    async def run():
        async with worker_pool(refuse) as (made, _, _):
            await made.call(b"anything")

    why = "worker 0 cannot start: ValueError: nothing can be made here"
    with pytest.raises(AllWorkersLost, match=f"no worker is left: {why}; {why.replace('0', '1')}"):
        asyncio.run(run())


class FlakyHost:
    """A home that loses what it has on request, and counts what it has at once."""

    def __init__(self, name: str) -> None:
        self.name, self.has, self.most = name, set[int](), 0
        self.fails: asyncio.Future[str] | None = None

    async def open(self) -> None:
        self.fails, self.has = asyncio.get_running_loop().create_future(), set()

    async def call(self, number: int, request: bytes) -> bytes:
        fails, has = self.fails, self.has  # of this life
        has.add(number)
        self.most = max(self.most, len(has))
        try:
            for _ in range(request[0] % 5):
                await asyncio.sleep(0)
                if fails.done():
                    raise WorkerLost(fails.result())
        finally:
            has.discard(number)
        return request

    def cancel(self, number: int) -> None: ...

    async def wait_ended(self) -> str:
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
        hosts = [FlakyHost(f"worker {i}") for i in range(workers)]
        made = WorkerPool(hosts, max_concurrency=most, log=lambda _: None)
        asked = [asyncio.create_task(made.call(bytes([i]))) for i in range(questions)]
        for when, which in sorted(losses):
            for _ in range(when):
                await asyncio.sleep(0)
            host = hosts[which % workers]
            if host.fails is not None and not host.fails.done():
                host.fails.set_result("on request")
        answers = await asyncio.gather(*asked)
        assert all(worker.load == 0 for worker in made._workers) and not made._waiting
        await made.close()
        return answers, hosts

    answers, hosts = asyncio.run(run())
    assert answers == [bytes([i]) for i in range(questions)]
    assert max(host.most for host in hosts) <= most
