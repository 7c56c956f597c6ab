"""The tools of a run, by name; opens for an attempt those that its prompt asks for.

calculator          arithmetic
python, shell       programs in the sandbox, on the attempt's files
files               read_file, write_file, list_files, grep: the same files
search              the documents the run was given
mcp:NAME            all tools of an MCP server
any other name      a tool of the user's own
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.sandbox.limits import Limits
from miles.rollout.sandbox.run import Sandbox
from miles.rollout.tools.calculator import calculator
from miles.rollout.tools.files import file_tools
from miles.rollout.tools.folder import Folder, folder
from miles.rollout.tools.mcp import Servers
from miles.rollout.tools.programs import Programs, python, shell
from miles.rollout.tools.search import Index, search
from miles.rollout.tools.tool import Tool, ToolError

BUILT_IN = ("calculator", "python", "shell", "files", "search")
MCP = "mcp:"
TOOLS_KEY = "tools"
"""Where a prompt's metadata names its tools: a list, or names with commas between."""
FILES_KEY = "files"
"""Where it has files to begin with: names and texts."""


def _no_tools() -> Mapping[str, Tool]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What tools need and a run has. ``sandbox`` is asked for when a prompt first wants to run something."""

    sandbox: Callable[[], Sandbox] | None = None
    programs: Limits = field(default_factory=Limits)
    index: Index | None = None
    servers: Servers | None = None
    own: Mapping[str, Tool] = field(default_factory=_no_tools)


class Box:
    """``default`` are the tools of prompts that name none."""

    def __init__(self, means: Means, default: Sequence[str] = ()) -> None:
        self._means = means
        self._sandbox: Sandbox | None = None
        self._default = tuple(default)
        for problem in filter(None, map(self.lacking, self._default)):
            raise UsageError(problem)

    def names(self, prompt: Prompt) -> tuple[str, ...]:
        """The tools a prompt has; DataError when it names one that is not there."""
        asked = prompt.metadata.get(TOOLS_KEY)
        if asked is None:
            return self._default
        if isinstance(asked, str):
            asked = [name.strip() for name in asked.split(",") if name.strip()]
        if not isinstance(asked, Sequence) or not all(isinstance(name, str) for name in asked):
            raise DataError(f"Prompt {prompt.id}: metadata['{TOOLS_KEY}'] must be a list of names, not {asked!r}.")
        for problem in filter(None, map(self.lacking, asked)):
            raise DataError(f"Prompt {prompt.id}: {problem}")
        return tuple(dict.fromkeys(asked))

    def lacking(self, name: str) -> str | None:
        """What keeps a tool from being there, as a sentence with the mend; None when it is."""
        means = self._means
        if name == "search" and means.index is None:
            return "The tool search needs documents; give the run a JSONL file of them."
        if name in ("python", "shell") and means.sandbox is None:
            return f"The tool {name} needs the sandbox, and this run has none."
        if name.startswith(MCP):
            known = () if means.servers is None else means.servers.names
            if name.removeprefix(MCP) in known:
                return None
            return f"There is no MCP server {name.removeprefix(MCP)} (there are {', '.join(known) or 'none'})."
        if name in BUILT_IN or name in means.own:
            return None
        every = (*BUILT_IN, *means.own)
        close = get_close_matches(name, every, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(every)} and {MCP}NAME."
        return f"There is no tool {name}; {hint}"

    async def open(self, prompt: Prompt, stack: AsyncExitStack) -> list[Tool]:
        """The tools of one attempt at ``prompt``; see environment.Hands."""
        desk = _Desk(prompt, stack)
        tools: list[Tool] = []
        for name in self.names(prompt):
            tools += await self._opened(name, desk, stack)
        return tools

    async def close(self) -> None:
        """End what all attempts shared."""
        if self._means.servers is not None:
            await self._means.servers.close()

    async def _opened(self, name: str, desk: _Desk, stack: AsyncExitStack) -> Sequence[Tool]:
        means = self._means
        if name.startswith(MCP):
            assert means.servers is not None
            return await means.servers.open(name.removeprefix(MCP), stack, desk.folder().root)
        if name in means.own:
            return [means.own[name]]
        if name == "calculator":
            return [calculator()]
        if name == "files":
            return file_tools(desk.folder())
        if name == "search":
            assert means.index is not None
            return [search(means.index)]
        programs = Programs(self._sandboxed(), desk.folder(), means.programs)
        return [python(programs) if name == "python" else shell(programs)]

    def _sandboxed(self) -> Sandbox:
        assert self._means.sandbox is not None
        if self._sandbox is None:
            self._sandbox = self._means.sandbox()
        return self._sandbox


class _Desk:
    """The folder of one attempt, made when the first tool wants it, with the prompt's files in it."""

    def __init__(self, prompt: Prompt, stack: AsyncExitStack) -> None:
        self._prompt = prompt
        self._stack = stack
        self._folder: Folder | None = None

    def folder(self) -> Folder:
        if self._folder is None:
            self._folder = self._stack.enter_context(folder())
            given: Any = self._prompt.metadata.get(FILES_KEY, {})
            if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in given.values()):
                raise DataError(f"Prompt {self._prompt.id}: metadata['{FILES_KEY}'] must be names with their texts.")
            try:
                for name, text in given.items():
                    self._folder.write(name, text.encode())
            except ToolError as error:
                raise DataError(f"Prompt {self._prompt.id}: metadata['{FILES_KEY}']: {error}.") from error
        return self._folder
