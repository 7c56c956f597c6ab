"""The world an attempt is made in, as the multi-turn loop sees it: it opens, answers replies, and closes.

::

    open(prompt) -> messages, tools      the policy reads them and replies
    step(reply)  -> messages, reward     ... until done
    close()                              however it ended
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.tool import Message, Tally, Tool, Toolbox, ToolLimits, ToolTimeUp


def _nothing() -> Mapping[str, float]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the policy reads first, and the tools it is offered (in OpenAI's form).

    ``scores``: the world says what an attempt earns, so that one it gave nothing has earned 0.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a reply led to. Rewards and their parts add up over an attempt.

    ``anew``: ``messages`` are the whole conversation, which goes on from them and not from what was said.
    ``limit`` names a bound the world ran into, which makes the attempt a truncated one.
    """

    messages: Sequence[Message] = ()
    reward: float | None = None
    parts: Mapping[str, float] = field(default_factory=_nothing)
    done: bool = False
    anew: bool = False
    limit: str | None = None


NOTES = "notes"
"""Under this key a reply says what in it could not be read as it was meant, such as a broken call; no model sees it."""


class Environment(Protocol):
    """One attempt's world. What it raises marks the attempt failed; ``close`` is called however it ended."""

    async def open(self, prompt: Prompt) -> Opening: ...
    async def step(self, reply: Message) -> Step: ...
    async def close(self) -> None: ...


Hands = Callable[[Prompt, AsyncExitStack], Awaitable[Sequence[Tool]]]
"""Opens the tools of one attempt; what they hold is closed with the stack."""


class ToolUse:
    """The world of a prompt and tools: calls are answered, and a reply without calls is the last.

    A reply whose only calls could not be read is told so, by the user since there is no call to answer to.
    """

    def __init__(self, hands: Hands, limits: ToolLimits) -> None:
        self._hands = hands
        self._limits = limits
        self._stack = AsyncExitStack()
        self._box = Toolbox((), limits)

    @property
    def tally(self) -> Tally:
        return self._box.tally

    async def open(self, prompt: Prompt) -> Opening:
        self._box = Toolbox(await self._hands(prompt, self._stack), self._limits)
        return Opening(messages=prompt.messages, tools=self._box.specs)

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls") or ()
        if not calls:
            return self._unread(reply)
        try:
            return Step(messages=await self._box.answer(calls))
        except ToolTimeUp:
            return Step(done=True, limit="tool_time")

    async def close(self) -> None:
        await self._stack.aclose()

    def _unread(self, reply: Message) -> Step:
        notes = reply.get(NOTES) or ()
        if not notes:
            return Step(done=True)
        self.tally.calls += 1
        self.tally.failures += 1
        return Step(messages=[{"role": "user", "content": f"Error: {' '.join(notes)}"}])


class Equipped:
    """A world whose policy has tools besides: calls of theirs are answered here, and all other replies go to it."""

    def __init__(self, world: Environment, hands: Hands, limits: ToolLimits) -> None:
        self._world = world
        self._tools = ToolUse(hands, limits)
        self._own: frozenset[str] = frozenset()

    @property
    def tally(self) -> Tally:
        return self._tools.tally

    async def open(self, prompt: Prompt) -> Opening:
        offered = await self._tools.open(prompt)
        self._own = frozenset(spec["function"]["name"] for spec in offered.tools)
        opening = await self._world.open(prompt)
        return Opening(messages=opening.messages, tools=(*offered.tools, *opening.tools), scores=opening.scores)

    async def step(self, reply: Message) -> Step:
        calls = reply.get("tool_calls") or ()
        if calls and all(call["function"]["name"] in self._own for call in calls):
            return await self._tools.step(reply)
        return await self._world.step(reply)

    async def close(self) -> None:
        try:
            await self._world.close()
        finally:
            await self._tools.close()
