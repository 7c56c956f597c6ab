"""A few child processes that grade what may not end, each call under a time limit that is kept by killing.

A thread of the pool waits for each child, so the event loop never does::

    reward --await--> thread --call--> child
                         |<--line-------+      answered
                         |--kill------> +      too late: the grade fails, and the next call starts a new child
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import queue
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from miles.rollout.reward.score import BadLabel, GradingError

_START_SECONDS = 120.0  # to start Python and import a grader's packages, on a machine that is busy
_LONGEST_ANSWER = 1 << 20  # bytes


class Workers:
    """At most ``count`` children, started when first needed; ``seconds`` is the limit of one call."""

    def __init__(self, count: int = 2, *, seconds: float = 5.0, memory: int = 4 << 30) -> None:
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="grade")
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()
        children = [_Child(memory) for _ in range(count)]
        for child in children:
            self._idle.put(child)
        self._end = weakref.finalize(self, _end_all, children)

    async def call(self, address: str, *args: Any) -> Any:
        """What ``module:function`` gives for these arguments; ``GradingError`` when it does not answer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, _called, self._idle, address, args, self._seconds)

    def close(self) -> None:
        """End the children; a call that is under way fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._end()


class _Child:
    """One process, when there is one."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._process: subprocess.Popen[bytes] | None = None
        self._loaded: set[str] = set()

    def call(self, address: str, args: Sequence[Any], seconds: float) -> Any:
        module = address.partition(":")[0]
        if self._process is None or self._process.poll() is not None:
            self._start()
        if module not in self._loaded:  # importing takes as long as it takes: that is not the grade's fault
            self._asked({"load": module}, _START_SECONDS)
            self._loaded.add(module)
        return self._asked({"call": address, "args": args, "seconds": seconds}, seconds)

    def end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _start(self) -> None:
        self.end()
        self._loaded = set()
        # The child imports what this process would; numeric libraries need no threads for one line of text.
        path = os.pathsep.join(place for place in sys.path if place)
        alone = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "miles.rollout.reward.worker", str(self._memory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **alone},
            bufsize=0,
            start_new_session=True,  # an interrupt on the terminal is ours to handle, not the children's
        )

    def _asked(self, request: dict[str, Any], seconds: float) -> Any:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            _write(process.stdin.fileno(), pickle.dumps(request))
            answer = json.loads(_line(process.stdout.fileno(), seconds))
        except TimeoutError as error:
            self.end()
            raise GradingError(f"it took more than {seconds:g} s") from error
        except (OSError, EOFError, ValueError) as error:
            reason = _ending(process)
            self.end()
            raise GradingError(f"the grading process died ({reason})") from error
        if "bad_label" in answer:
            raise BadLabel(answer["bad_label"])
        if "error" in answer:
            raise GradingError(answer["error"])
        return answer["value"]


def _called(idle: queue.SimpleQueue[_Child], address: str, args: Sequence[Any], seconds: float) -> Any:
    """In a thread: borrow a child that is free. It knows nothing of its Workers, whose end must not wait for it."""
    child = idle.get()
    try:
        return child.call(address, args, seconds)
    finally:
        idle.put(child)


def _line(descriptor: int, seconds: float) -> bytes:
    """What can be read until a newline, or ``TimeoutError``."""
    read, poll = bytearray(), select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline = time.monotonic() + seconds
    while not read.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        piece = os.read(descriptor, 65536)
        if not piece or len(read) > _LONGEST_ANSWER:
            raise EOFError
        read += piece
    return bytes(read)


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "its answer was no answer"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _end_all(children: Sequence[_Child]) -> None:
    for child in children:
        child.end()
