"""Programs for a model to run: Python and shell commands in the sandbox, on the files of the attempt.

Every call is a sandbox of its own: no process outlives it, but the files it leaves are there for the next one.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from miles.rollout.sandbox import layers
from miles.rollout.sandbox.limits import Limits, Outcome, SandboxError
from miles.rollout.sandbox.run import Sandbox
from miles.rollout.tools import carried
from miles.rollout.tools.folder import Folder
from miles.rollout.tools.tool import EnvironmentFailed, Tool, ToolError

_CARRIED_BYTES = 16 << 20
_PROGRAM = ".miles_program.py"
_SAID = {
    "wall": "was ended: it took more than {wall:g} seconds",
    "cpu": "was ended: it used more than {cpu:g} seconds of CPU time",
    "memory": "was ended: it used too much memory",
    "output": "was ended: it wrote too much",
    "processes": "was ended: it had too many processes",
}


class Programs:
    """Runs an attempt's programs. ``limits`` are those of one call."""

    def __init__(self, sandbox: Sandbox, folder: Folder, limits: Limits) -> None:
        self._sandbox = sandbox
        self._folder = folder
        # What comes back is on standard output too, and base64 makes four bytes of three.
        self._limits = replace(limits, output=limits.output + _CARRIED_BYTES * 4 // 3 + (1 << 16))
        self._said = limits.output

    async def run(self, argv: Sequence[str], program: str | None = None) -> str:
        """What the command said. The files it left are in the folder; a command that was ended leaves none."""
        password = secrets.token_hex(16)
        files = {f"{carried.FOLDER}/{name}": data for name, data in self._folder.contents().items()}
        if program is not None:
            files[f"{carried.FOLDER}/{_PROGRAM}"] = program.encode(errors="replace")
        order = {"password": password, "argv": list(argv), "most": _CARRIED_BYTES}
        try:
            outcome = await self._sandbox.run(
                Path(carried.__file__).read_text(encoding="utf-8"),
                stdin=json.dumps(order).encode(),
                limits=self._limits,
                files=files,
            )
        except SandboxError as error:
            raise EnvironmentFailed(str(error)) from error
        said, found, answer = outcome.stdout.partition(password.encode())
        text = said[: self._said].decode(errors="replace")
        if not found or not outcome.fine:
            raise ToolError(_ended(outcome, text, self._limits))
        try:
            return self._kept(text, json.loads(answer))
        except json.JSONDecodeError as error:
            raise ToolError(f"the program left processes behind that went on writing\nIts output:\n{text}") from error

    def _kept(self, text: str, answer: Mapping[str, Any]) -> str:
        files = {name: base64.b64decode(data) for name, data in answer["files"].items() if name != _PROGRAM}
        notes: list[str] = []
        if answer["left_out"]:
            notes.append(f"[too large to be kept: {', '.join(answer['left_out'][:5])}]")
        if answer["exit"]:
            notes.append(f"[exit status {answer['exit']}]")
        try:
            self._folder.replace(files)
        except ToolError as error:
            notes.append(f"[not all files were kept: {error}]")
        return "\n".join(part for part in (text.rstrip("\n"), *notes) if part) or "[no output]"


def python(programs: Programs) -> Tool:
    """The tool ``python``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return await programs.run((layers.interpreter(), "-s", "-S", "-B", _PROGRAM), arguments["code"])

    about = (
        "Run a Python program and return what it prints. Only the standard library is there, and no network. "
        "Variables are gone afterwards; files in the working folder stay."
    )
    return _tool("python", about, "code", "The program; print what you want to see.", call)


def shell(programs: Programs) -> Tool:
    """The tool ``shell``."""

    async def call(arguments: Mapping[str, Any]) -> str:
        return await programs.run(("/bin/sh", "-c", arguments["command"]))

    about = (
        "Run a shell command in the working folder and return what it prints. There is no network. "
        "Variables and processes are gone afterwards; files in the working folder stay."
    )
    return _tool("shell", about, "command", "The command, as for sh -c.", call)


def _tool(
    name: str, description: str, argument: str, meaning: str, call: Callable[[Mapping[str, Any]], Awaitable[str]]
) -> Tool:
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string", "description": meaning}},
        "required": [argument],
    }
    return Tool(name=name, description=description, parameters=schema, call=call)


def _ended(outcome: Outcome, text: str, limits: Limits) -> str:
    if outcome.killed_by is not None:
        why = _SAID[outcome.killed_by].format(wall=limits.wall, cpu=limits.cpu)
    else:
        why = f"ended with {layers.last_line(outcome.stderr) or f'signal {outcome.signal}'}"
    return f"the program {why}" + (f"\nIts output until then:\n{text}" if text else "")
