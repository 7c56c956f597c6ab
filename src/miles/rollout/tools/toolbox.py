"""Tool registry of a run: opens for a trajectory the tools its prompt asks for.

calculator          arithmetic
python, shell       programs in the sandbox, on the trajectory's files
files               read_file, write_file, list_files, grep on the same files
search              BM25 over the run's documents
crop, zoom          parts of the prompt's images
mcp:NAME            all tools of an MCP server
any other name      a user-defined tool
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.media_store import MediaStore
from miles.core.types import Prompt
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import CodeSandbox
from miles.rollout.tools.calculator import build_calculator_tool
from miles.rollout.tools.code import CodeRunner, build_python_tool, build_shell_tool
from miles.rollout.tools.files import build_file_tools
from miles.rollout.tools.images import ImageTools
from miles.rollout.tools.mcp import MCPServers
from miles.rollout.tools.search import BM25Index, build_search_tool
from miles.rollout.tools.tool import Tool, ToolError
from miles.rollout.tools.workspace import Workspace, temporary_workspace

BUILT_IN = ("calculator", "python", "shell", "files", "search", "crop", "zoom")
MCP = "mcp:"
TOOLS_KEY = "tools"
"""Metadata key with a prompt's tools: a list of names, or a comma-separated string."""
FILES_KEY = "files"
"""Metadata key with a prompt's initial files: names and texts."""


def _no_tools() -> Mapping[str, Tool]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResources:
    """Resources tools need. ``sandbox`` is called when a prompt first runs a program; ``custom`` are user tools;
    ``media`` has the images of a model that reads images."""

    sandbox: Callable[[], CodeSandbox] | None = None
    code_limits: SandboxLimits = field(default_factory=SandboxLimits)
    index: BM25Index | None = None
    servers: MCPServers | None = None
    custom: Mapping[str, Tool] = field(default_factory=_no_tools)
    media: MediaStore | None = None


class ToolRegistry:
    """``default`` are the tools of prompts that name none."""

    def __init__(self, resources: ToolResources, default: Sequence[str] = ()) -> None:
        self._resources = resources
        self._sandbox: CodeSandbox | None = None
        self._default = tuple(default)
        for problem in filter(None, map(self.find_problem, self._default)):
            raise UsageError(problem)

    @property
    def code_limits(self) -> SandboxLimits:
        """The limits of one program."""
        return self._resources.code_limits

    def names(self, prompt: Prompt) -> tuple[str, ...]:
        """The names of a prompt's tools; DataError for an unknown one."""
        names = prompt.metadata.get(TOOLS_KEY)
        if names is None:
            return self._default
        if isinstance(names, str):
            names = [name.strip() for name in names.split(",") if name.strip()]
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise DataError(f"Prompt {prompt.id}: metadata['{TOOLS_KEY}'] must be a list of names, not {names!r}.")
        for problem in filter(None, map(self.find_problem, names)):
            raise DataError(f"Prompt {prompt.id}: {problem}")
        return tuple(dict.fromkeys(names))

    def find_problem(self, name: str) -> str | None:
        """Why a tool is unavailable, in one sentence with the fix; None when it is available."""
        resources = self._resources
        if name == "search" and resources.index is None:
            return "The tool search needs documents; give a JSONL file with --search-documents."
        if name in ("python", "shell") and resources.sandbox is None:
            return f"The tool {name} needs the sandbox, which this run does not have."
        if name in ("crop", "zoom") and resources.media is None:
            return f"The tool {name} needs a checkpoint that reads images; name another tool, or another checkpoint."
        if name.startswith(MCP):
            known = () if resources.servers is None else resources.servers.names
            if name.removeprefix(MCP) in known:
                return None
            return f"There is no MCP server {name.removeprefix(MCP)} (there are {', '.join(known) or 'none'})."
        if name in BUILT_IN or name in resources.custom:
            return None
        available = (*BUILT_IN, *resources.custom)
        matches = get_close_matches(name, available, n=1)
        hint = f"did you mean {matches[0]}?" if matches else f"there are {', '.join(available)} and {MCP}NAME."
        return f"There is no tool {name}; {hint}"

    async def open(self, prompt: Prompt, stack: AsyncExitStack) -> list[Tool]:
        """Open the tools of one trajectory; see environment.OpenTools."""
        workspace = _LazyWorkspace(prompt, stack, self._resources.code_limits.scratch)
        images = None if self._resources.media is None else ImageTools(prompt, self._resources.media)
        tools: list[Tool] = []
        for name in self.names(prompt):
            if name in ("crop", "zoom") and images is not None and name not in self._resources.custom:
                tools.append(images.build_crop() if name == "crop" else images.build_zoom())
            else:
                tools += await self._open_tool(name, workspace, stack)
        return tools

    async def close(self) -> None:
        """Stop what all trajectories share."""
        if self._resources.servers is not None:
            await self._resources.servers.close()

    async def _open_tool(self, name: str, workspace: _LazyWorkspace, stack: AsyncExitStack) -> Sequence[Tool]:
        resources = self._resources
        if name.startswith(MCP):
            assert resources.servers is not None
            return await resources.servers.open(name.removeprefix(MCP), stack, workspace.open().root)
        if name in resources.custom:
            return [resources.custom[name]]
        if name == "calculator":
            return [build_calculator_tool()]
        if name == "files":
            return build_file_tools(workspace.open())
        if name == "search":
            assert resources.index is not None
            return [build_search_tool(resources.index)]
        runner = CodeRunner(self.get_sandbox(), workspace.open(), resources.code_limits)
        return [build_python_tool(runner) if name == "python" else build_shell_tool(runner)]

    def get_sandbox(self) -> CodeSandbox:
        """The sandbox of the run, created when first used."""
        if self._resources.sandbox is None:
            raise UsageError("Programs of tools and environments need the sandbox, which this run does not have.")
        if self._sandbox is None:
            self._sandbox = self._resources.sandbox()
        return self._sandbox


class _LazyWorkspace:
    """One trajectory's workspace, created with the prompt's files when a tool first needs it."""

    def __init__(self, prompt: Prompt, stack: AsyncExitStack, max_bytes: int) -> None:
        self._prompt = prompt
        self._stack = stack
        self._max_bytes = max_bytes
        self._workspace: Workspace | None = None

    def open(self) -> Workspace:
        if self._workspace is None:
            self._workspace = self._stack.enter_context(temporary_workspace(self._max_bytes))
            files: Any = self._prompt.metadata.get(FILES_KEY, {})
            if not isinstance(files, Mapping) or not all(isinstance(text, str) for text in files.values()):
                raise DataError(f"Prompt {self._prompt.id}: metadata['{FILES_KEY}'] must map file names to texts.")
            try:
                for name, text in files.items():
                    self._workspace.write(name, text.encode())
            except ToolError as error:
                raise DataError(f"Prompt {self._prompt.id}: metadata['{FILES_KEY}']: {error}.") from error
        return self._workspace
