"""Sandbox: run a program through a supervisor process and await its result."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Protocol

from miles.core.errors import UsageError
from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import (
    IsolationPlan,
    RunRequest,
    SandboxBackend,
    SandboxLimits,
    SandboxResult,
    decode_result,
    encode_request,
)

MAIN = "main.py"
NO_FILES: Mapping[str, bytes] = MappingProxyType({})
SPARE_SECONDS = 60.0  # for starting and cleaning up on a busy machine, besides the program's own time
_GRACE_SECONDS = 10.0  # for a supervisor that was asked to stop to kill and reap its processes


class CodeSandbox(Protocol):
    """What runs model-written programs: this module's Sandbox, or container.ContainerSandbox."""

    @property
    def python(self) -> str: ...

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        companion: Sequence[str] = (),
    ) -> SandboxResult: ...


class Sandbox:
    """Runs model-written programs, ``concurrency`` at a time, with the isolation of ``plan`` (see ``isolation``).

    >>> outcome = await sandbox_here(unsandboxed=False, concurrency=8).run("print(6 * 7)")  # doctest: +SKIP
    >>> outcome.stdout, outcome.exit, outcome.killed_by  # doctest: +SKIP
    (b'42\\n', 0, None)
    """

    def __init__(self, plan: IsolationPlan, *, concurrency: int = 8) -> None:
        self._plan = plan
        self._slots = asyncio.Semaphore(concurrency)

    @property
    def python(self) -> str:
        """The command of the Python that runs programs."""
        return isolation.interpreter()

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        companion: Sequence[str] = (),
    ) -> SandboxResult:
        """Run Python source, or a command, in an empty folder with ``files`` in it.

        ``companion`` is a second command in the same sandbox, which reads what the first writes to descriptor 4 and
        writes what the first reads from descriptor 3. The run ends with the first.
        However it ends, cancellation included, none of its processes and files are left. Raises SandboxError when the
        sandbox itself failed, not the program.
        """
        request = build_request(self._plan, program, stdin=stdin, limits=limits, files=files, companion=companion)
        async with self._slots:
            seconds = request.limits.wall + SPARE_SECONDS
            command = isolation.start_command(self._plan)
            data, error_line, _ = await exchange_request(command, encode_request(request), seconds, environment={})
        result = decode_result(data)
        if result is None or result.error:
            why = error_line if result is None else result.error
            raise SandboxError(f"The sandbox could not run {request.argv[0]}: {why or 'its supervisor was killed'}.")
        return result


def create_sandbox(*, unsandboxed: bool, concurrency: int, backend: SandboxBackend = "native") -> Sandbox:
    """A sandbox with the strongest isolation this machine has; UsageError when that is too weak or a trial run fails.

    Blocks the event loop for a few tenths of a second.
    """
    plan = isolation.plan_isolation(unsandboxed=unsandboxed, backend=backend)
    command, pipe = isolation.start_command(plan), subprocess.PIPE
    with subprocess.Popen(command, env={}, start_new_session=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(encode_request(build_request(plan, "print(6 * 7)")))
            process.stdin.flush()
        data, error_line = process.stdout.read(), process.stderr.read()
    result = decode_result(data)
    if result is None or result.stdout != b"42\n":
        said = error_line if result is None else result.error.encode() or result.stderr
        raise UsageError(
            f"Not even print(6 * 7) runs in the sandbox here, with {isolation.interpreter()}: "
            f"{isolation.last_line(said)}; "
            "install Miles with a Python that needs nothing but its own folder and the system's libraries."
        )
    return Sandbox(plan, concurrency=concurrency)


def build_request(
    plan: IsolationPlan,
    program: str | Sequence[str],
    *,
    stdin: bytes = b"",
    limits: SandboxLimits | None = None,
    files: Mapping[str, bytes] = NO_FILES,
    companion: Sequence[str] = (),
    python: str | None = None,
) -> RunRequest:
    """Build the request that runs Python source, with ``python`` or the interpreter of this machine, or a command."""
    if isinstance(program, str):
        files = {**files, MAIN: program.encode(errors="replace")}
        argv = (python or isolation.interpreter(), "-s", "-S", "-B", MAIN)
    else:
        argv = tuple(program)
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or name == ".":
            raise ValueError(f"{name!r} is not the name of a file in a scratch folder")
    limits = limits or SandboxLimits()
    readable, temporary = isolation.readable_paths(), tempfile.gettempdir()
    return RunRequest(argv, plan, limits, readable, temporary, files, stdin, tuple(companion))


async def exchange_request(
    command: Sequence[str], request: bytes, seconds: float, *, environment: Mapping[str, str] | None
) -> tuple[bytes, str, int | None]:
    """Send a request to a fresh supervisor; returns its reply, its last line of standard error and its exit status.

    ``environment`` None is that of this process.
    """
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        async with asyncio.timeout(seconds):
            with contextlib.suppress(ConnectionError):  # a dead supervisor reports why on standard error
                process.stdin.write(request)
                await process.stdin.drain()
            data, error_line = await asyncio.gather(process.stdout.read(), process.stderr.read())
    except TimeoutError:
        data, error_line = b"", b"its supervisor did not answer"
    finally:
        await _stop(process)
    return data, isolation.last_line(error_line), process.returncode


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Close the supervisor's standard input, which stops it, and await its exit, even if cancelled meanwhile."""
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
