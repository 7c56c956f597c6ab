"""A change of weights waits for the answers under way, goes before those that come later, and is alone."""

import asyncio

from miles.backends.native.server.request_handler import RWLock


def test_a_change_waits_for_all_and_holds_those_that_come():
    async def story() -> list[str]:
        lock, reported, leave = RWLock(), [], asyncio.Event()

        async def answer(name: str) -> None:
            async with lock.acquire_read():
                reported.append(f"{name} in")
                await leave.wait()
                reported.append(f"{name} out")

        async def change(name: str) -> None:
            async with lock.acquire_write():
                reported.append(f"{name} begins with {lock._num_readers}")
                await asyncio.sleep(0)
                reported.append(f"{name} ends")

        first = asyncio.create_task(answer("a"))
        await asyncio.sleep(0)
        changes = [asyncio.create_task(change(name)) for name in ("x", "y")]
        await asyncio.sleep(0)
        late = asyncio.create_task(answer("b"))
        await asyncio.sleep(0)
        assert reported == ["a in"] and lock._num_readers == 1
        leave.set()
        await asyncio.gather(first, *changes, late)
        return reported

    assert asyncio.run(story()) == [
        *("a in", "a out", "x begins with 0", "x ends", "y begins with 0", "y ends"),
        *("b in", "b out"),
    ]


def test_a_change_at_once_waits_for_nobody():
    async def story() -> int:
        lock = RWLock()
        async with lock.acquire_read(), lock.acquire_write(immediate=True):
            return lock._num_readers

    assert asyncio.run(story()) == 1


def test_a_change_that_is_given_up_releases_the_lock():
    async def story() -> None:
        lock = RWLock()
        async with lock.acquire_read():
            waiting = asyncio.create_task(lock.acquire_write().__aenter__())
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with asyncio.timeout(5), lock.acquire_read():
                assert lock._num_readers == 2

    asyncio.run(story())
