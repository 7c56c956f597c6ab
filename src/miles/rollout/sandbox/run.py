"""Run a program in the sandbox and wait for what comes of it."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType

from miles.core.errors import UsageError
from miles.rollout.sandbox import layers
from miles.rollout.sandbox.limits import Limits, Outcome, SandboxError
from miles.rollout.sandbox.order import Bounds, Order, Plan, packed_order, read_answer

MAIN = "main.py"
_NONE: Mapping[str, bytes] = MappingProxyType({})
_SPARE_SECONDS = 60.0  # what starting and cleaning up may take on a busy machine, besides the program's own time
_GRACE_SECONDS = 10.0  # how long a supervisor that was told to stop has to bury what it started


class Sandbox:
    """Runs programs a model wrote, ``concurrency`` at a time. ``plan`` is which walls to build: see ``layers``.

    >>> outcome = await sandbox_here(unsandboxed=False, concurrency=8).run("print(6 * 7)")  # doctest: +SKIP
    >>> outcome.stdout, outcome.exit, outcome.killed_by  # doctest: +SKIP
    (b'42\\n', 0, None)
    """

    def __init__(self, plan: Plan, *, concurrency: int = 8) -> None:
        self._plan = plan
        self._turn = asyncio.Semaphore(concurrency)

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: bytes = b"",
        limits: Limits | None = None,
        files: Mapping[str, bytes] = _NONE,
    ) -> Outcome:
        """Run Python source, or a command, in an empty folder with ``files`` in it.

        However it ends, cancelled too, no process and no file of it is left. Raises SandboxError when the sandbox, not
        the program, failed.
        """
        order = order_of(self._plan, program, stdin=stdin, limits=limits, files=files)
        async with self._turn:
            data, complaint = await _exchanged(packed_order(order), order.bounds.wall + _SPARE_SECONDS)
        answer = read_answer(data)
        if answer is None or answer.error:
            why = complaint if answer is None else answer.error
            raise SandboxError(f"The sandbox could not run {order.argv[0]}: {why or 'its supervisor was killed'}.")
        return Outcome(
            exit=answer.exit,
            signal=answer.signal,
            stdout=answer.stdout,
            stderr=answer.stderr,
            seconds=answer.seconds,
            killed_by=answer.killed_by,
        )


def sandbox_here(*, unsandboxed: bool, concurrency: int) -> Sandbox:
    """A sandbox of the strongest walls this machine has, tried out; UsageError when they are too few or it fails.

    Takes a few tenths of a second, and the event loop's as well.
    """
    plan = layers.plan_here(unsandboxed=unsandboxed)
    command, pipe = layers.supervisor_command("supervisor"), subprocess.PIPE
    with subprocess.Popen(command, env={}, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(packed_order(order_of(plan, "print(6 * 7)")))
            process.stdin.flush()
        data, complaint = process.stdout.read(), process.stderr.read()
    answer = read_answer(data)
    if answer is None or answer.stdout != b"42\n":
        said = complaint if answer is None else answer.error.encode() or answer.stderr
        raise UsageError(
            f"Not even print(6 * 7) runs in the sandbox here, with {layers.interpreter()}: {layers.last_line(said)}; "
            "install Miles with a Python that needs nothing but its own folder and the system's libraries."
        )
    return Sandbox(plan, concurrency=concurrency)


def order_of(
    plan: Plan,
    program: str | Sequence[str],
    *,
    stdin: bytes = b"",
    limits: Limits | None = None,
    files: Mapping[str, bytes] = _NONE,
) -> Order:
    """What a supervisor is told to run a program."""
    if isinstance(program, str):
        files = {**files, MAIN: program.encode(errors="replace")}
        argv = (layers.interpreter(), "-s", "-S", "-B", MAIN)
    else:
        argv = tuple(program)
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
            raise ValueError(f"{name!r} is not the name of a file in a scratch folder")
    at = limits or Limits()
    bounds = Bounds(at.wall, at.cpu, at.memory, at.processes, at.file, at.scratch, at.output)
    return Order(argv, plan, bounds, layers.readable_paths(), tempfile.gettempdir(), files, stdin)


async def _exchanged(order: bytes, seconds: float) -> tuple[bytes, str]:
    """What a fresh supervisor answers to an order, and the last of what it complained about."""
    process = await asyncio.create_subprocess_exec(
        *layers.supervisor_command("supervisor"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):  # a supervisor that is gone says why on its standard error
                process.stdin.write(order)
                await process.stdin.drain()
            data, complaint = await asyncio.gather(process.stdout.read(), process.stderr.read())
    except TimeoutError:
        data, complaint = b"", b"its supervisor did not answer"
    finally:
        await _stopped(process)
    return data, layers.last_line(complaint)


async def _stopped(process: asyncio.subprocess.Process) -> None:
    """Close the supervisor's standard input, which tells it to stop, and see it go, even if cancelled meanwhile."""
    assert process.stdin is not None
    process.stdin.close()
    gone = asyncio.ensure_future(process.wait())
    cancelled: asyncio.CancelledError | None = None
    while not gone.done():
        try:
            await asyncio.wait({gone}, timeout=_GRACE_SECONDS)
        except asyncio.CancelledError as error:
            cancelled = error
            continue
        if not gone.done():
            process.kill()
    if cancelled is not None:
        raise cancelled
