"""Code tools: Python and shell commands in the sandbox, on the files of the trajectory.

Every call runs in its own sandbox: no process outlives it, but the files it leaves are there for the next call.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.isolation import SandboxError
from miles.rollout.sandbox.protocol import SandboxLimits, SandboxResult
from miles.rollout.sandbox.run import CodeSandbox
from miles.rollout.tools import sandbox_runner
from miles.rollout.tools.tool import EnvironmentFailed, Tool, ToolError
from miles.rollout.tools.workspace import Workspace

_MAX_FILE_BYTES = 16 << 20
_RUNNER_BYTES = 1 << 20
_PROGRAM = ".miles_program.py"
_KILL_REASONS = {
    "wall": "was ended: it took more than {wall:g} seconds",
    "cpu": "was ended: it used more than {cpu:g} seconds of CPU time",
    "memory": "was ended: it used too much memory",
    "output": "was ended: it wrote too much",
    "processes": "was ended: it had too many processes",
}


class CodeRunner:
    """Runs a trajectory's runner. ``limits`` are those of one call, which returns ``max_file_bytes`` of files."""

    def __init__(
        self,
        sandbox: CodeSandbox,
        workspace: Workspace,
        limits: SandboxLimits,
        *,
        max_file_bytes: int = _MAX_FILE_BYTES,
    ) -> None:
        self._sandbox = sandbox
        self._workspace = workspace
        # The files come back on standard output as well, in base64, which makes four bytes of three. The runner is a
        # process too, and its source and the program are files.
        self._limits = limits._replace(
            output=limits.output + max_file_bytes * 4 // 3 + (1 << 16),
            processes=limits.processes + 1,
            scratch=limits.scratch + _RUNNER_BYTES,
        )
        self._max_output = limits.output
        self._max_file_bytes = max_file_bytes

    @property
    def python(self) -> str:
        """The command of the Python that runs programs."""
        return self._sandbox.python

    async def run(self, argv: Sequence[str], program: str | None = None) -> str:
        """Run a command and return its output. The workspace keeps its files; a killed command leaves none."""
        password = secrets.token_hex(16)
        files = {f"{sandbox_runner.FOLDER}/{name}": data for name, data in self._workspace.contents().items()}
        if program is not None:
            files[f"{sandbox_runner.FOLDER}/{_PROGRAM}"] = program.encode(errors="replace")
        request = {"password": password, "argv": list(argv), "max_bytes": self._max_file_bytes}
        try:
            outcome = await self._sandbox.run(
                Path(sandbox_runner.__file__).read_text(encoding="utf-8"),
                stdin=json.dumps(request).encode(),
                limits=self._limits,
                files=files,
            )
        except SandboxError as error:
            raise EnvironmentFailed(str(error)) from error
        output, separator, reply = outcome.stdout.partition(password.encode())
        text = output[: self._max_output].decode(errors="replace")
        if not separator or not outcome.is_success:
            raise ToolError(_failure_text(outcome, text, self._limits))
        try:
            return self._store_files(text, json.loads(reply))
        except json.JSONDecodeError as error:
            raise ToolError(f"the program left processes behind that kept writing\nIts output:\n{text}") from error

    def _store_files(self, text: str, reply: Mapping[str, Any]) -> str:
        files = {name: base64.b64decode(data) for name, data in reply["files"].items() if name != _PROGRAM}
        notes: list[str] = []
        if reply["left_out"]:
            notes.append(f"[too large to be kept: {', '.join(reply['left_out'][:5])}]")
        if reply["exit"]:
            notes.append(f"[exit status {reply['exit']}]")
        try:
            self._workspace.replace(files)
        except ToolError as error:
            notes.append(f"[not all files were kept: {error}]")
        return "\n".join(part for part in (text.rstrip("\n"), *notes) if part) or "[no output]"


def build_python_tool(runner: CodeRunner) -> Tool:
    """Build the tool ``python``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return await runner.run((runner.python, "-s", "-S", "-B", _PROGRAM), arguments["code"])

    description = (
        "Run a Python program and return what it prints. Only the standard library is there, and no network. "
        "Variables are gone afterwards; files in the working folder stay."
    )
    return _tool("python", description, "code", "The program; print what you want to see.", call)


def build_shell_tool(runner: CodeRunner) -> Tool:
    """Build the tool ``shell``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return await runner.run(("/bin/sh", "-c", arguments["command"]))

    description = (
        "Run a shell command in the working folder and return what it prints. There is no network. "
        "Variables and processes are gone afterwards; files in the working folder stay."
    )
    return _tool("shell", description, "command", "The command, as for sh -c.", call)


def _tool(
    name: str, description: str, argument: str, meaning: str, call: Callable[[Mapping[str, Any]], Awaitable[str]]
) -> Tool:
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return Tool(name=name, description=description, parameters=schema, call=call)


def _failure_text(outcome: SandboxResult, text: str, limits: SandboxLimits) -> str:
    if outcome.killed_by is not None:
        why = _KILL_REASONS[outcome.killed_by].format(wall=limits.wall, cpu=limits.cpu)
    else:
        why = f"ended with {isolation.last_line(outcome.stderr) or f'signal {outcome.signal}'}"
    return f"the program {why}" + (f"\nIts output until then:\n{text}" if text else "")
