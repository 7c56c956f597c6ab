"""At most so many trajectories at once, in the order they came; fewer where the engine's memory is short."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.rollout.concurrency import ConcurrencyLimiter, StartedAwaitable


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), max_size=30), st.integers(1, 8), st.booleans())
def test_no_more_than_the_limit_are_inside_and_all_get_in(groups, limit, by_group):
    async def play():
        throttle = ConcurrencyLimiter(limit, granularity="group" if by_group else "sample")
        most, entered = 0, []

        async def one(number, size, turns):
            nonlocal most
            async with throttle.group(size) if by_group else throttle.sample():
                entered.append(number)
                most = max(most, throttle.running)
                for _ in range(turns):
                    await asyncio.sleep(0)

        await asyncio.gather(*(one(n, *group) for n, group in enumerate(groups)))
        assert throttle.running == 0
        return most, entered

    most, entered = asyncio.run(play())
    assert entered == list(range(len(groups)))
    assert most <= max([limit, *(size for size, _ in groups)]) if by_group else most <= limit


def test_one_who_gives_up_waiting_takes_no_place():
    async def play():
        throttle = ConcurrencyLimiter(1, granularity="sample")
        async with throttle.sample():
            waiting = [asyncio.create_task(throttle.sample().__aenter__()) for _ in range(2)]
            await asyncio.sleep(0)
            waiting[0].cancel()
        await waiting[1]
        return throttle.running, waiting[0].cancelled()

    assert asyncio.run(play()) == (1, True)


def test_the_limit_follows_the_engines_memory():
    reported = {"preemptions": 0.0, "waiting": 0.0}

    async def pressure():
        return reported

    async def play():
        throttle = ConcurrencyLimiter(20, granularity="sample", load=pressure)
        limits = []

        async def batch(count):
            async def one():
                async with throttle.sample():
                    await asyncio.sleep(0)

            await asyncio.gather(*(one() for _ in range(count)))
            limits.append(throttle.limit)

        await batch(20)
        reported["preemptions"] = 1.0
        await batch(20)
        reported["waiting"] = 3.0
        await batch(3)
        reported["waiting"] = 0.0
        await batch(400)
        return limits

    calm, short, held, again = asyncio.run(play())
    assert calm == 20 and short < 20 and held == short and again == 20


def test_a_started_awaitable_that_never_waits_is_done():
    async def add():
        return 3

    async def run():
        started = StartedAwaitable(add())
        assert started.is_done
        return started.result()

    assert asyncio.run(run()) == 3


def test_a_started_awaitable_continues_where_it_waits():
    async def add(log):
        log.append("begun")
        first = await asyncio.sleep(0, 2)
        return first + await asyncio.sleep(0, 3)

    async def run():
        log = []
        started = StartedAwaitable(add(log))
        assert not started.is_done and log == ["begun"]
        later = StartedAwaitable(asyncio.ensure_future(add([])))
        return await started + await later

    assert asyncio.run(run()) == 10


def test_a_started_awaitable_may_handle_its_cancellation():
    async def wait(log):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            log.append("cancelled")
            raise

    async def run():
        log = []
        with pytest.raises(TimeoutError):
            started = StartedAwaitable(wait(log))
            async with asyncio.timeout(0):
                await started
        return log

    assert asyncio.run(run()) == ["cancelled"]


def test_errors_of_a_started_awaitable_are_raised_where_it_starts_and_where_it_is_awaited():
    async def fail(waits):
        if waits:
            await asyncio.sleep(0)
        raise ValueError("wrong")

    async def run():
        with pytest.raises(ValueError, match="wrong"):
            StartedAwaitable(fail(False))
        started = StartedAwaitable(fail(True))
        with pytest.raises(ValueError, match="wrong"):
            await started

    asyncio.run(run())
