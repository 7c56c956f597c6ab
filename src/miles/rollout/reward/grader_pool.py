"""Pool of grader processes for graders that may not terminate; a call that exceeds its time limit is killed.

A thread waits for each child, so the event loop never blocks::

    reward --await--> thread --call--> child
                         |<--line-------+      replied
                         |--kill------> +      timed out: the grade fails, and the next call starts a new child
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import select
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles.cluster.process import ChildProcess, describe_exit, python_environment
from miles.rollout.reward.types import BadLabel, GradingError

_START_SECONDS = 120.0  # to start Python and import a grader's packages on a busy machine
_MAX_REPLY_BYTES = 1 << 20  # bytes


class GraderPool:
    """At most ``count`` processes, started when first needed; ``seconds`` limits one call."""

    def __init__(self, count: int = 2, *, seconds: float = 5.0, memory: int = 4 << 30) -> None:
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="grade")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        children = [_Worker(memory) for _ in range(count)]
        for child in children:
            self._idle.put(child)
        self._finalizer = weakref.finalize(self, _kill_all, children)

    async def call(self, address: str, *args: Any) -> Any:
        """Call ``module:function`` in a worker; ``GradingError`` when it does not reply."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _call_free_child, self._idle, address, args, self._seconds)

    def close(self) -> None:
        """Kill the processes; a running call fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()


class _Worker:
    """One worker process, started on demand."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: ChildProcess | None = None
        self._loaded: set[str] = set()

    def call(self, address: str, args: Sequence[Any], seconds: float) -> Any:
        module = address.partition(":")[0]
        if self._process is None or self._process.poll() is not None:
            self._start()
        if module not in self._loaded:  # imports do not count as grading time
            self._request({"load": module}, _START_SECONDS)
            self._loaded.add(module)
        return self._request({"call": address, "args": args, "seconds": seconds}, seconds)

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _start(self) -> None:
        self.kill()
        self._loaded = set()
        # Numeric libraries need no threads for one line of text.
        env = python_environment({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        self._process = ChildProcess(
            [sys.executable, "-m", "miles.rollout.reward.grader_worker", str(self._memory)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def _request(self, request: dict[str, Any], seconds: float) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _write_all(process.stdin.fileno(), pickle.dumps(request))
            reply = json.loads(_read_line(process.stdout.fileno(), seconds))
        except TimeoutError as error:
            self.kill()
            raise GradingError(f"it took more than {seconds:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            reason = _exit_reason(process)
            self.kill()
            raise GradingError(f"the grading process died ({reason})") from error
        if "bad_label" in reply:
            raise BadLabel(reply["bad_label"])
        if "error" in reply:
            raise GradingError(reply["error"])
        return reply["value"]


def _call_free_child(idle: queue.SimpleQueue[_Worker], address: str, args: Sequence[Any], seconds: float) -> Any:
    """In a thread: use a free child. Holds no reference to the pool, whose finalizer must not wait for it."""
    child = idle.get()
    try:
        return child.call(address, args, seconds)
    finally:
        idle.put(child)


def _read_line(descriptor: int, seconds: float) -> bytes:
    """Read until a newline, or raise ``TimeoutError``."""
    buffer, poll = bytearray(), select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while not buffer.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        chunk = os.read(descriptor, 65536)
        if not chunk or len(buffer) > _MAX_REPLY_BYTES:
            raise EOFError
        buffer += chunk
    return bytes(buffer)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _exit_reason(process: ChildProcess) -> str:
    try:
        return describe_exit(process.wait(1.0))
    except subprocess.TimeoutExpired:
        return "its reply was invalid"


def _kill_all(children: Sequence[_Worker]) -> None:
    for child in children:
        child.kill()
