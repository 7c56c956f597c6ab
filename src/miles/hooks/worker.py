"""Worker threads of user functions: an event loop of their own, so that none can stop the run's event loop.

    run's loop   run(f) ----post---->  ...  <----- result (or: cancelled, and not waited for)
    worker       f's task: computes, awaits, and may ask for work of the run's loop: run_on_main_loop(engine.generate)

A deadline is a cancellation of ``run``, which returns at once whatever the function does. All functions share one
thread, hence one loop for their clients and locks, and are called in order. When that thread is blocked for
``patience`` seconds, calls that wait for it move to a further thread.

``lockstep`` keeps a run reproducible: the run's loop waits, for at most ``patience`` seconds, until the worker has
nothing to do but wait, so that the order of events depends on the program alone, as if there were one thread.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import Context, copy_context
from typing import Any, TypeVar

from miles.core.errors import HookError, describe_error
from miles.hooks.guard import HookExit

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds that a function may block its thread before the others stop waiting for it."""
MAX_THREADS = 64
_GRACE = 1.0
_CLOSE_SECONDS = 0.2


class HookWorker:
    """Runs user functions off the event loop. ``report`` is called when one does not stop in time."""

    def __init__(
        self, *, lockstep: bool = False, patience: float = PATIENCE, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self._lockstep = lockstep
        self._patience = patience
        self._report = report
        self._threads: list[_LoopThread] = []
        self._main_loop: asyncio.AbstractEventLoop | None = None
        self._cancelled: list[_Call] = []
        self.leaked = 0

    async def run(self, work: Callable[[], Awaitable[T]], name: str) -> T:
        """Await ``work()`` on the worker's loop; ``name`` is for reports. When cancelled, it is not waited for."""
        self._main_loop = asyncio.get_running_loop()
        call = _Call(work, name, self._main_loop)
        thread = self._threads[-1] if self._threads else self._start_thread()
        call.submit(thread)
        self._settle(thread)
        if call.outcome is not None:
            return call.get_result()
        call.timer = self._main_loop.call_later(self._patience, self._move, call)
        try:
            await call.ended.wait()
        except asyncio.CancelledError:
            call.cancel()
            self._cancelled.append(call)
            self._main_loop.call_later(_GRACE, self._check_ended, call)
            raise
        finally:
            call.timer.cancel()
        return call.get_result()

    async def run_sync(self, work: Callable[[], T], name: str) -> T:
        """Call a plain function in the worker's thread."""

        async def call() -> T:
            return work()

        return await self.run(call, name)

    async def run_on_main_loop(self, work: Callable[[], Awaitable[T]]) -> T:
        """From a user function: await ``work()`` on the run's loop."""
        loop = asyncio.get_running_loop()
        if loop is self._main_loop:
            return await work()
        assert self._main_loop is not None, "called from a function that run() awaits"
        thread = next((thread for thread in self._threads if thread.loop is loop), None)
        if thread is None:
            raise HookError("The engine was used on an event loop of the user's own; await it in the function itself.")
        answer: asyncio.Future[T] = loop.create_future()
        tasks: list[asyncio.Task[T]] = []
        self._main_loop.call_soon_threadsafe(self._start_on_main_loop, work, tasks, answer, thread)
        try:
            return await answer
        except asyncio.CancelledError:
            self._main_loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            raise

    def post(self, callback: Callable[..., object], *args: object) -> Callable[..., None]:
        """From a user function: a callback that may be called on the run's loop, and is executed on this one."""
        loop = asyncio.get_running_loop()
        return lambda *more: self._post_to(loop, callback, *args, *more)

    def list_loops(self) -> list[asyncio.AbstractEventLoop]:
        """The loops of all threads, for reports of what they wait for."""
        return [thread.loop for thread in self._threads]

    def close(self) -> None:
        """End the threads; one that is blocked ends with the process."""
        for thread in self._threads if self._cancelled else ():
            thread.settle(_CLOSE_SECONDS)
        for call in tuple(self._cancelled):
            self._check_ended(call)
        for thread in self._threads:
            thread.close()
        self._threads.clear()

    def _start_thread(self) -> _LoopThread:
        thread = _LoopThread(f"hooks-{len(self._threads)}")
        self._threads.append(thread)
        return thread

    def _settle(self, thread: _LoopThread) -> None:
        if self._lockstep:
            thread.settle(self._patience)

    def _move(self, call: _Call) -> None:
        """Move a call that its thread has not started if the thread is blocked, else look again later."""
        if call.is_started or call.thread is None or self._main_loop is None:
            return
        left = self._patience - call.thread.get_blocked_seconds()
        if left > 0:
            call.timer = self._main_loop.call_later(left, self._move, call)
            return
        if call.thread is self._threads[-1] and len(self._threads) < MAX_THREADS:
            self._start_thread()
        if call.thread is not self._threads[-1]:
            call.submit(self._threads[-1])

    def _check_ended(self, call: _Call) -> None:
        if call not in self._cancelled:
            return
        self._cancelled.remove(call)
        if call.outcome is not None or not call.is_started:
            return
        self.leaked += 1
        if self.leaked & (self.leaked - 1) == 0:  # 1, 2, 4, 8 ...
            self._report(
                f"{call.name} did not end when it was cancelled, and still runs in its thread ({self.leaked} such "
                "calls so far); give what it waits for a time limit of its own."
            )

    def _start_on_main_loop(
        self,
        work: Callable[[], Awaitable[T]],
        tasks: list[asyncio.Task[T]],
        answer: asyncio.Future[T],
        thread: _LoopThread,
    ) -> None:
        async def run() -> T:
            return await work()

        def deliver(task: asyncio.Task[T]) -> None:
            with suppress(RuntimeError):  # its loop was closed
                thread.post(_copy_outcome, task, answer)
                self._settle(thread)

        task = asyncio.ensure_future(run())
        tasks.append(task)
        task.add_done_callback(deliver)

    def _post_to(self, loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *args: object) -> None:
        for thread in self._threads:
            if thread.loop is loop:
                thread.post(callback, *args)


class _Call:
    """One call of a user function. ``outcome`` is its result or its error, once there is one."""

    def __init__(self, work: Callable[[], Awaitable[Any]], name: str, main_loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.outcome: tuple[Any, BaseException | None] | None = None
        self.ended = asyncio.Event()
        self.is_started = False
        self.thread: _LoopThread | None = None
        self.timer: asyncio.TimerHandle | None = None
        self._work = work
        self._main_loop = main_loop
        self._context: Context = copy_context()
        self._task: asyncio.Task[Any] | None = None
        self._is_cancelled = False
        self._lock = threading.Lock()

    def submit(self, thread: _LoopThread) -> None:
        """Have ``thread`` start it, instead of the thread it was submitted to before."""
        with self._lock:
            if self.is_started:
                return
            self.thread = thread
        thread.post(self._start, thread)

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            thread = self.thread
        if thread is not None:
            with suppress(RuntimeError):  # its loop was closed
                thread.post(self._cancel_task)

    def get_result(self) -> Any:
        assert self.outcome is not None
        result, error = self.outcome
        if error is not None:
            raise error
        return result

    # -- in the worker's thread

    def _start(self, thread: _LoopThread) -> None:
        thread.loop.create_task(self._execute(thread), name=self.name, context=self._context.copy())

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _execute(self, thread: _LoopThread) -> None:
        with self._lock:
            if self.thread is not thread or self._is_cancelled or self.is_started:
                return  # it was moved or cancelled while the thread was blocked
            self.is_started = True
        self._task = asyncio.current_task()
        try:
            self.outcome = await self._work(), None
        except asyncio.CancelledError as error:
            self.outcome = None, error if self._is_cancelled else HookExit(describe_error(error))
        except Exception as error:
            self.outcome = None, error
        except BaseException as error:  # SystemExit must end neither this loop nor the process
            self.outcome = None, HookExit(describe_error(error))
        with suppress(RuntimeError):  # the run has ended
            self._main_loop.call_soon_threadsafe(self.ended.set)


class _LoopThread:
    """An event loop in a daemon thread that knows when it is idle."""

    def __init__(self, name: str) -> None:
        self._condition = threading.Condition()
        self._posted = 0
        self._handled = 0
        self._idle_after = 0
        self._is_late = False
        self._last_turn = time.monotonic()
        self.loop = asyncio.SelectorEventLoop(_LoopSelector(self._mark_turn))
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Have the loop call it soon."""
        with self._condition:
            self._posted += 1
        self.loop.call_soon_threadsafe(self._handle, callback, *args)

    def settle(self, seconds: float) -> None:
        """Return when the loop is idle after all that was posted; a loop that once was late is not waited for again
        until it is idle."""
        with self._condition:
            is_idle = self._condition.wait_for(
                lambda: self._idle_after == self._posted, 0.0 if self._is_late else seconds
            )
            self._is_late = not is_idle

    def close(self) -> None:
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=_GRACE) if tasks else asyncio.sleep(0))
        finally:
            self.loop.close()

    def _handle(self, callback: Callable[..., object], *args: object) -> None:
        with self._condition:
            self._handled += 1
        callback(*args)

    def get_blocked_seconds(self) -> float:
        """How long its loop has not come to a further turn; 0 where it has nothing to do."""
        with self._condition:
            return 0.0 if self._idle_after == self._posted else time.monotonic() - self._last_turn

    def _mark_turn(self, is_idle: bool) -> None:
        with self._condition:
            self._last_turn = time.monotonic()
            if is_idle:
                self._idle_after = self._handled
                self._condition.notify_all()


class _LoopSelector(selectors.DefaultSelector):
    """A selector that reports each turn of its loop, and whether the loop waits with nothing else to do."""

    def __init__(self, on_turn: Callable[[bool], None]) -> None:
        super().__init__()
        self._on_turn = on_turn

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._on_turn(timeout is None or timeout > 0)
        return super().select(timeout)


def _copy_outcome(task: asyncio.Task[T], answer: asyncio.Future[T]) -> None:
    if answer.done():
        return
    if task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())
