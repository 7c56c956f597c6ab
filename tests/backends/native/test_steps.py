"""Steps that follow each other without a trip to the event loop: only where nobody there waits for one of them."""

import asyncio
import threading
from dataclasses import replace

import pytest
from tests.backends.native.conftest import Tiny

from miles.backends.native.engine.request import GenerateRequest
from miles.cluster.executor import InlineExecutor, ThreadExecutor
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Status

LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


class Trips:
    """A ``Run`` that counts what it is asked to do, on a thread of its own."""

    is_threaded = True

    def __init__(self):
        self.count, self._inner = 0, ThreadExecutor("steps")

    async def __call__(self, work):
        self.count += 1
        return await self._inner(work)

    def close(self):
        self._inner.close()


class Clock:
    """Blocks until it is released."""

    now = 0.0

    def __call__(self):
        return self.now


class Held:
    """Lets an engine launch ``free`` steps; the next waits until ``go`` is set, having set ``reached``."""

    def __init__(self, engine, free, note=lambda number: None):
        self.launched, self._free, self._launch, self._note = 0, free, engine._runner.launch, note
        self.reached, self.go = threading.Event(), threading.Event()
        engine._runner.launch = self.launch

    def launch(self, order):
        if self.launched == self._free:
            self.reached.set()
            assert self.go.wait(60)
        self.launched += 1
        self._note(self.launched)
        return self._launch(order)

    async def until_reached(self):
        assert await asyncio.to_thread(self.reached.wait, 60)


@pytest.fixture
def made():
    """An engine with one step in flight, its trips and its clock."""
    trips, clock = Trips(), Clock()
    yield Tiny(1).engine(page_size=4, run=trips, clock=clock), trips, clock
    trips.close()


def alone(request):
    return Tiny().alone(request, page_size=4)


def test_a_request_alone_takes_few_trips_and_has_the_same_answer(made):
    engine, trips, _ = made
    request = (Tiny().prompts(1)[0], LONG)
    Tiny().same(Tiny().generate_all(engine, [request])[0], alone(request))
    assert engine.stats()["steps"] == 60
    assert trips.count == 1


@pytest.mark.parametrize(("depth", "run"), [(0, Trips), (1, InlineExecutor)])
def test_without_overlap_or_a_thread_of_its_own_every_step_is_a_trip(depth, run):
    run = run()
    engine = Tiny(depth).engine(page_size=4, run=run)
    steps = []
    engine._run_timed_step, timed = lambda: steps.append(engine.stats()["steps"]) or timed(), engine._run_timed_step
    request = (Tiny().prompts(1)[0], replace(LONG, max_new_tokens=9))
    Tiny().same(Tiny().generate_all(engine, [request])[0], alone(request))
    assert steps[:9] == list(range(9))
    run.close()


def test_time_ends_what_nobody_else_does(made):
    engine, trips, clock = made
    Held(engine, -1, lambda number: setattr(clock, "now", clock.now + 0.001))
    request = (Tiny().prompts(1)[0], LONG)
    Tiny().same(Tiny().generate_all(engine, [request])[0], alone(request))
    assert 60 / 4 <= trips.count <= 60 / 2


def test_who_ends_is_told_before_another_step_is_made(made):
    engine, _, _ = made
    short, long = (Tiny().prompts(2)[0], replace(LONG, max_new_tokens=5)), (Tiny().prompts(2)[1], LONG)
    reported, deliver = [], engine._deliver

    def delivered(ended):
        reported.append((len(ended), engine.stats()["steps"]))
        deliver(ended)

    engine._deliver = delivered
    for answer, request in zip(Tiny().generate_all(engine, [short, long]), (short, long), strict=True):
        Tiny().same(answer, alone(request))
    assert reported == [(1, 6), (1, 60)]  # the first with one more in flight


def test_who_listens_hears_of_every_step(made):
    engine, trips, _ = made
    prompt = Tiny().prompts(1)[0]

    async def story():
        async with engine.submit(GenerateRequest(tokens=prompt, sampling=LONG)) as answer:
            return [len(piece.tokens) async for piece in answer]

    pieces = asyncio.run(story())
    assert sum(pieces) == 60
    assert max(pieces) <= 3
    assert trips.count >= 20


@pytest.mark.parametrize("what", ["arrive", "leave", "pause", "close"])
def test_whoever_comes_ends_it_with_the_step_under_way(made, what):
    engine, _, _ = made
    held = Held(engine, 10)
    first, second = [(p, LONG) for p in Tiny().prompts(2)]
    wanted = alone(first)

    async def story():
        task = asyncio.create_task(engine.generate(*first))
        await held.until_reached()
        if what == "leave":
            task.cancel()
            await asyncio.sleep(0)
            held.go.set()
            await asyncio.gather(task, return_exceptions=True)
            assert await engine.flush_cache()  # nobody runs any more
            assert engine.stats()["steps"] <= 12
            return None
        verb = {"arrive": lambda: engine.generate(*second), "pause": engine.pause, "close": engine.close}[what]
        other = asyncio.create_task(verb())
        await asyncio.sleep(0)
        held.go.set()
        if what == "arrive":
            return await asyncio.gather(task, other)
        await other
        steps = engine.stats()["steps"]
        if what == "close":
            with pytest.raises(EngineError, match="was closed"):
                await task
            return steps
        await engine.resume()
        Tiny().same(await task, wanted)
        return steps

    came = asyncio.run(story())
    if what == "arrive":
        for answer, request in zip(came, (first, second), strict=True):
            Tiny().same(answer, alone(request))
    elif what != "leave":
        assert came == 11
    Tiny().check(engine)


def test_an_abort_waits_for_steps_that_end_by_themselves(made):
    engine, _, clock = made
    held = Held(engine, 10)

    async def story():
        task = asyncio.create_task(engine.generate(Tiny().prompts(1)[0], LONG))
        await held.until_reached()
        abort = asyncio.create_task(engine.abort())
        await asyncio.sleep(0)
        clock.now += 1.0
        held.go.set()
        assert await abort == 1
        return await task

    answer = asyncio.run(story())
    assert answer.status is Status.ABORTED
    assert len(Tiny().tokens(answer)) == 11
    Tiny().check(engine)


def test_weights_that_come_in_between_find_a_step_between_two(made):
    engine, _, _ = made
    held = Held(engine, 10)
    request = (Tiny().prompts(1)[0], LONG)

    async def story():
        task = asyncio.create_task(engine.generate(*request))
        await held.until_reached()
        publishing = threading.Thread(target=Tiny().publish, args=(engine, Tiny().decoder(1)), kwargs={"number": 1})
        publishing.start()
        held.go.set()
        answer = await task
        publishing.join()
        return answer

    spans = asyncio.run(story()).spans
    assert sum(len(span) for span in spans) == 60
    first = sum(len(span) for span in spans if span.version.number == 0)
    assert Tiny().tokens(alone(request))[:first] == [int(token) for token in spans[0].tokens]
    Tiny().check(engine)
