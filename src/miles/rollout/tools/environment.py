"""Environments of multi-turn rollouts, as the loop uses them: open, step for each reply, close.

::

    open(prompt) -> messages, tools      the policy reads them and replies
    step(reply)  -> messages, reward     ... until done
    close()                              however it ended
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Protocol

from miles.core.errors import UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.sandbox.protocol import SandboxLimits
from miles.rollout.sandbox.run import CodeSandbox
from miles.rollout.tools.tool import Message, Tool, Toolbox, ToolLimits, ToolStats, ToolTimeExceeded


def _no_parts() -> Mapping[str, float]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenResult:
    """The first messages, and the tools the policy is offered (OpenAI format).

    ``provides_reward``: the environment scores trajectories, so that one without any reward has earned 0.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    provides_reward: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The response to a reply. Rewards and their parts add up over a trajectory.

    ``replaces_history``: ``messages`` are the whole conversation, which continues from them instead of the history.
    ``limit`` names a limit the environment hit, which marks the trajectory truncated.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=_no_parts)
    done: bool = False
    replaces_history: bool = False
    limit: str | None = None


NOTES = "notes"
"""Key of a reply with notes on what could not be parsed, such as a malformed tool call; no model sees it."""


class Environment(Protocol):
    """One trajectory's environment. An exception marks the trajectory failed; ``close`` is called in any case."""

    async def open(self, prompt: Prompt) -> OpenResult: ...
    async def step(self, reply: Message) -> StepResult: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxContext:
    """What an environment that runs programs gets of the run."""

    sandbox: Callable[[], CodeSandbox]
    code_limits: SandboxLimits
    tool_limits: ToolLimits


OpenTools = Callable[[Prompt, AsyncExitStack], Awaitable[Sequence[Tool]]]
"""Opens the tools of one trajectory; the stack closes their resources."""


class ToolEnvironment:
    """A prompt and tools: calls are answered, and a reply without calls is the last.

    A reply with only malformed calls gets an error as a user message, since there is no call to answer.
    """

    def __init__(self, open_tools: OpenTools, limits: ToolLimits) -> None:
        self._open_tools = open_tools
        self._limits = limits
        self._stack = AsyncExitStack()
        self._toolbox = Toolbox((), limits)

    @property
    def stats(self) -> ToolStats:
        return self._toolbox.stats

    async def open(self, prompt: Prompt) -> OpenResult:
        self._toolbox = Toolbox(await self._open_tools(prompt, self._stack), self._limits)
        return OpenResult(messages=prompt.messages, tools=self._toolbox.specs)

    async def step(self, reply: Message) -> StepResult:
        calls = reply.get("tool_calls") or ()
        if not calls:
            return self._report_malformed_calls(reply)
        try:
            return StepResult(messages=await self._toolbox.answer(calls))
        except ToolTimeExceeded:
            return StepResult(done=True, limit="tool_time")

    async def close(self) -> None:
        await self._stack.aclose()

    def _report_malformed_calls(self, reply: Message) -> StepResult:
        notes = reply.get(NOTES) or ()
        if not notes:
            return StepResult(done=True)
        self.stats.calls += 1
        self.stats.failures += 1
        return StepResult(messages=[{"role": "user", "content": f"Error: {' '.join(notes)}"}])


class ToolAugmentedEnvironment:
    """An environment plus tools: replies that call only these tools are answered here, others by the environment."""

    def __init__(self, environment: Environment, open_tools: OpenTools, limits: ToolLimits) -> None:
        self._environment = environment
        self._tools = ToolEnvironment(open_tools, limits)
        self._tool_names: frozenset[str] = frozenset()

    @property
    def stats(self) -> ToolStats:
        return self._tools.stats

    async def open(self, prompt: Prompt) -> OpenResult:
        offered = await self._tools.open(prompt)
        self._tool_names = frozenset(spec["function"]["name"] for spec in offered.tools)
        opening = await self._environment.open(prompt)
        return OpenResult(
            messages=opening.messages, tools=(*offered.tools, *opening.tools), provides_reward=opening.provides_reward
        )

    async def step(self, reply: Message) -> StepResult:
        calls = reply.get("tool_calls") or ()
        if calls and all(call["function"]["name"] in self._tool_names for call in calls):
            return await self._tools.step(reply)
        return await self._environment.step(reply)

    async def close(self) -> None:
        try:
            await self._environment.close()
        finally:
            await self._tools.close()


def import_package(name: str, *, environment: str, install: str) -> Any:
    """Import the package an environment needs; UsageError with the install command when it is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"The environment {environment} needs {error.name}, which is not installed; pip install {install}."
        ) from error
