"""User functions off the event loop: they can block, swallow cancellation or raise what they like; the loop goes on."""

import asyncio
import contextlib
import threading
import time

import pytest

from miles.hooks.guard import HookExit
from miles.hooks.worker import HookWorker


async def cancel_started(worker: HookWorker, work):
    """Cancel a call once it has started, as a deadline does."""
    started = threading.Event()

    def start():
        started.set()
        return work()

    call = asyncio.create_task(worker.run(start, "The reward"))
    while not started.is_set():
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def answer():
    return 7


@pytest.mark.parametrize("lockstep", [False, True])
def test_a_function_that_blocks_its_thread_stops_neither_the_loop_nor_later_calls(lockstep):
    release = threading.Event()

    async def blocks():
        release.wait()

    async def main():
        worker = HookWorker(lockstep=lockstep, patience=0.1)
        await cancel_started(worker, blocks)
        assert await asyncio.wait_for(worker.run(answer, "The reward"), 60) == 7
        release.set()
        worker.close()

    asyncio.run(main())


def test_calls_that_wait_for_a_blocked_thread_move_to_another():
    release = threading.Event()

    async def blocks():
        release.wait()

    async def main():
        worker = HookWorker(patience=0.1)
        blocked = asyncio.create_task(worker.run(blocks, "The reward"))
        others = [worker.run(answer, "The reward") for _ in range(3)]
        assert await asyncio.wait_for(asyncio.gather(*others), 60) == [7] * 3
        assert not blocked.done()
        release.set()
        await asyncio.wait_for(blocked, 60)
        worker.close()

    asyncio.run(main())


def test_a_call_that_cancels_itself_is_a_failure():
    async def cancels():
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1)

    async def main():
        worker = HookWorker()
        with pytest.raises(HookExit, match="CancelledError"):
            await asyncio.wait_for(worker.run(cancels, "The reward"), 60)
        worker.close()

    asyncio.run(main())


def test_a_function_that_swallows_cancellation_is_left_behind_and_reported():
    reports, release = [], threading.Event()

    async def swallows():
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.01)

    async def main():
        reported = asyncio.Event()
        worker = HookWorker(report=lambda text: (reports.append(text), reported.set()))
        await cancel_started(worker, swallows)
        assert await worker.run(answer, "The reward") == 7
        await asyncio.wait_for(reported.wait(), 60)
        assert worker.leaked == 1 and reports[0].startswith("The reward did not end when it was cancelled")
        release.set()
        worker.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), KeyboardInterrupt(), GeneratorExit()])
def test_what_would_end_the_process_or_the_task_is_a_failure(error):
    async def raises():
        raise error

    async def main():
        worker = HookWorker()
        with pytest.raises(HookExit, match=type(error).__name__):
            await worker.run(raises, "The reward")
        assert await worker.run(answer, "The reward") == 7
        worker.close()

    asyncio.run(main())


def test_work_for_the_runs_loop_is_done_there_and_cancelled_with_its_function():
    threads, cancelled = [], asyncio.Event()

    async def at_home():
        threads.append(threading.current_thread())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def main():
        worker = HookWorker(lockstep=True)
        assert await worker.run(lambda: worker.run_on_main_loop(answer), "The reward") == 7
        await cancel_started(worker, lambda: worker.run_on_main_loop(at_home))
        await asyncio.wait_for(cancelled.wait(), 60)
        assert threads == [threading.current_thread()]
        worker.close()

    asyncio.run(main())


def test_in_lockstep_the_order_of_events_is_that_of_one_thread():
    """Functions of several turns, with a loop at home that counts its own turns meanwhile."""

    async def main() -> list[tuple[int, int]]:
        worker, turns, seen = HookWorker(lockstep=True), 0, []

        async def turn():
            await asyncio.sleep(0)
            return turns

        async def play(number):
            for _ in range(4):
                time.sleep(0.0005 * (number % 3))  # how long it takes must not matter
                seen.append((number, await worker.run_on_main_loop(turn)))

        async def tick():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        await asyncio.gather(*(worker.run(lambda n=n: play(n), "play") for n in range(5)))
        ticking.cancel()
        worker.close()
        return seen

    first = asyncio.run(main())
    assert all(asyncio.run(main()) == first for _ in range(5))
