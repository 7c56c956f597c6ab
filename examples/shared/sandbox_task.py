"""An environment for work on files: a folder with tools on it, and a program that checks what is left in the folder.

A row's metadata has ``files`` (names and texts) and ``check``: Python that runs in the sandbox, on a copy of the
folder, when the policy calls no more tools. It is worth 1 if the check ends without an exception. The policy never
sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from miles.core.types import Prompt
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import Sandbox, create_sandbox
from miles.rollout.tools.code import CodeRunner, build_python_tool, build_shell_tool
from miles.rollout.tools.environment import OpenResult, StepResult, ToolEnvironment
from miles.rollout.tools.files import build_file_tools
from miles.rollout.tools.tool import Message, Tool, ToolLimits
from miles.rollout.tools.workspace import Workspace, temporary_workspace

LIMITS = SandboxLimits(wall=20.0, cpu=10.0)
CONCURRENCY = 8


@lru_cache(maxsize=1)
def _get_sandbox(loop: asyncio.AbstractEventLoop) -> Sandbox:
    """One sandbox for all trajectories of a run, whose semaphore belongs to the run's loop."""
    return create_sandbox(unsandboxed=False, concurrency=CONCURRENCY)


class SandboxTask(ToolEnvironment):
    """One trajectory's folder. ``tools`` of a subclass are any of ``files``, ``shell`` and ``python``."""

    tools: ClassVar[Sequence[str]] = ("files", "shell", "python")

    def __init__(self) -> None:
        super().__init__(self._open_folder, ToolLimits())
        self._check = ""
        self._folder: Workspace | None = None

    async def open(self, prompt: Prompt) -> OpenResult:
        self._check = str(prompt.metadata["check"])
        return replace(await super().open(prompt), provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        result = await super().step(reply)
        if not result.done or result.limit is not None:
            return result
        return replace(result, reward=await self._run_check())

    async def _open_folder(self, prompt: Prompt, stack: AsyncExitStack) -> list[Tool]:
        self._folder = stack.enter_context(temporary_workspace())
        for name, text in prompt.metadata["files"].items():
            self._folder.write(name, text.encode())
        runner = CodeRunner(_get_sandbox(asyncio.get_running_loop()), self._folder, LIMITS)
        offered = {
            "files": build_file_tools(self._folder),
            "shell": [build_shell_tool(runner)],
            "python": [build_python_tool(runner)],
        }
        return [tool for name in self.tools for tool in offered[name]]

    async def _run_check(self) -> float:
        assert self._folder is not None, "it was opened"
        sandbox = _get_sandbox(asyncio.get_running_loop())
        outcome = await sandbox.run(self._check, limits=LIMITS, files=self._folder.contents())
        return float(outcome.is_success)
