"""Container sandbox: runs each program in a container of its own, with docker or podman.

::

    run ──request──► docker run -i ──► launcher (first process) ──► program, companion
        ◄──result───                   limits of time and output    limits of memory, processes, files: the container's

The limits become flags of ``docker run``, and closing its standard input ends the container.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from miles.core.errors import UsageError
from miles.rollout.sandbox import container_launcher, isolation
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import (
    IsolationPlan,
    SandboxLimits,
    SandboxResult,
    decode_result,
    encode_request,
)
from miles.rollout.sandbox.run import NO_FILES, SPARE_SECONDS, build_request, exchange_request

ContainerEngine = Literal["docker", "podman"]
PYTHON = "python3"
SCRATCH = "/scratch"
PROGRAM_USER, COMPANION_USER = 65534, 65533
_KILLED = 137  # status of a container whose first process was killed
_CLIENT_SECONDS = 60.0  # for one request to the container engine
_LAUNCHER_PROCESSES = 1
# what asks an engine whether it can run containers
_PING: Mapping[ContainerEngine, tuple[str, ...]] = {
    "docker": ("version", "--format", "{{.Server.Version}}"),
    "podman": ("info", "--format", "{{.Version.Version}}"),
}


class ContainerSandbox:
    """Runs model-written programs, ``concurrency`` at a time, each in a new container of ``image`` (see run.Sandbox).

    The image needs ``python3``. It is never pulled.
    """

    def __init__(self, engine: ContainerEngine, executable: str, image: str, *, concurrency: int = 8) -> None:
        self._engine: ContainerEngine = engine
        self._executable = executable
        self._image = image
        self._slots = asyncio.Semaphore(concurrency)

    @property
    def python(self) -> str:
        """The command of the Python that runs programs."""
        return PYTHON

    async def run(
        self,
        program: str | Sequence[str],
        *,
        stdin: bytes = b"",
        limits: SandboxLimits | None = None,
        files: Mapping[str, bytes] = NO_FILES,
        companion: Sequence[str] = (),
    ) -> SandboxResult:
        """Run Python source, or a command, in an empty folder with ``files`` in it (see run.Sandbox.run)."""
        limits = limits or SandboxLimits()
        data = _encode(program, stdin=stdin, limits=limits, files=files, companion=companion)
        async with self._slots:
            name = f"miles-sandbox-{secrets.token_hex(8)}"
            command = self._command(name, limits, companion=bool(companion))
            ended = False
            try:
                reply, error_line, code = await exchange_request(
                    command, data, limits.wall + SPARE_SECONDS, environment=None
                )
                ended = bool(reply)
            finally:
                if not ended:
                    await asyncio.shield(asyncio.to_thread(self._remove, name))
        return _read_reply(reply, error_line, code)

    def try_run(self) -> str | None:
        """Run a trial program; why it did not run, or None. Blocks."""
        limits = SandboxLimits()
        command = self._command(f"miles-sandbox-{secrets.token_hex(8)}", limits, companion=False)
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdin is not None and process.stdout is not None and process.stderr is not None
            with contextlib.suppress(BrokenPipeError):  # the reason is on standard error
                process.stdin.write(_encode("print(6 * 7)", limits=limits))
                process.stdin.flush()
            reply, said = process.stdout.read(), process.stderr.read()
        result = decode_result(reply)
        if result is None:
            return isolation.last_line(said)
        return None if result.stdout == b"42\n" else result.error or isolation.last_line(result.stderr)

    def _command(self, name: str, limits: SandboxLimits, *, companion: bool) -> list[str]:
        flags = container_flags(self._engine, name, limits, companion=companion)
        source = Path(container_launcher.__file__).read_text(encoding="utf-8")
        users = (str(PROGRAM_USER), str(COMPANION_USER)) if companion else ()
        launcher = (PYTHON, "-I", "-S", "-B", "-c", source, SCRATCH, *users)
        return [self._executable, "run", *flags, self._image, *launcher]

    def _remove(self, name: str) -> None:
        """Kill and remove a container that may still run; it may be gone already."""
        subprocess.run(
            [self._executable, "rm", "--force", name], capture_output=True, check=False, timeout=_CLIENT_SECONDS
        )


def container_flags(engine: ContainerEngine, name: str, limits: SandboxLimits, *, companion: bool) -> list[str]:
    """The flags of ``docker run`` for these limits.

    A program alone has the launcher's user, which is nobody. With a companion the launcher is root, with no capability
    but to change users, and gives each a user of its own, so that neither can read or trace the other.
    """
    processes = limits.processes + _LAUNCHER_PROCESSES + (limits.processes if companion else 0)
    flags = ["--interactive", "--rm", "--pull=never", f"--name={name}", "--log-driver=none", "--label=miles-sandbox"]
    flags += ["--network=none", "--ipc=none", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
    if companion:
        flags += ["--user=0:0", "--cap-add=SETUID", "--cap-add=SETGID"]
    else:
        flags += [f"--user={PROGRAM_USER}:{PROGRAM_USER}"]
    if engine == "podman":
        flags += ["--read-only-tmpfs=false"]  # no writable /tmp, /run and /var/tmp beside the scratch folder
    flags += [f"--memory={limits.memory}", f"--memory-swap={limits.memory}", f"--pids-limit={processes}"]
    flags += [f"--ulimit=fsize={limits.file}:{limits.file}", "--ulimit=core=0:0"]
    flags += [f"--tmpfs={SCRATCH}:rw,exec,nosuid,nodev,size={limits.scratch},mode=1777", f"--workdir={SCRATCH}"]
    return flags


def create_container_sandbox(engine: ContainerEngine, *, image: str, concurrency: int) -> ContainerSandbox:
    """A sandbox of containers; UsageError where the engine, its daemon or the image is missing, or a trial run fails.

    Blocks for as long as a container takes to start.
    """
    flag = f"--code-sandbox {engine}"
    executable = shutil.which(engine)
    if executable is None:
        raise UsageError(f"{flag} needs {engine}, which is not on the path; install it, or use --code-sandbox native.")
    if problem := _ask(executable, *_PING[engine]):
        what = "no daemon answers docker" if engine == "docker" else "podman cannot run containers"
        raise UsageError(f"{flag}: {what} here ({problem}); start it, or use --code-sandbox native.")
    if _ask(executable, "image", "inspect", image):
        raise UsageError(
            f"{flag}: there is no image {image} here; pull it with {engine} pull {image}, or name another with "
            "--code-sandbox-image."
        )
    sandbox = ContainerSandbox(engine, executable, image, concurrency=concurrency)
    if problem := sandbox.try_run():
        raise UsageError(
            f"{flag}: not even print(6 * 7) runs in a container of {image} ({problem}); the image needs {PYTHON}, and "
            "the engine must be able to limit memory and processes."
        )
    return sandbox


def _ask(executable: str, *arguments: str) -> str | None:
    """The last line of a failed request to the engine; None when it succeeded."""
    try:
        done = subprocess.run([executable, *arguments], capture_output=True, check=False, timeout=_CLIENT_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no answer within {_CLIENT_SECONDS:g} s"
    return isolation.last_line(done.stderr) if done.returncode else None


def _encode(
    program: str | Sequence[str],
    *,
    stdin: bytes = b"",
    limits: SandboxLimits,
    files: Mapping[str, bytes] = NO_FILES,
    companion: Sequence[str] = (),
) -> bytes:
    request = build_request(
        IsolationPlan(), program, stdin=stdin, limits=limits, files=files, companion=companion, python=PYTHON
    )
    return encode_request(request._replace(readable=(), temporary=""))


def _read_reply(reply: bytes, error_line: str, code: int | None) -> SandboxResult:
    result = decode_result(reply)
    if result is None and not reply and code == _KILLED:
        return SandboxResult(signal=9, killed_by="memory")  # the kernel killed the launcher with its program
    if result is None or result.error:
        why = error_line if result is None else result.error
        raise SandboxError(f"The container could not run the program: {why}.")
    return result
