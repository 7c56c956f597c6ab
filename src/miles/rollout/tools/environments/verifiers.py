"""Environments of the package ``verifiers``: they drive the conversation themselves, so here the door is turned round.

::

    open   --starts-->  env.rollout(row, client) --asks--> our client --messages--> open returns them
    step   --reply---->                          <-reply-- our client
           <-messages-  ... asks again, or ends, is scored by its rubric, and step says done

The client is OpenAI's own, over a transport that hands each request to the loop instead of to a network. From 0.4 on
the package has episodes instead (see ``episodes``), whose programs are given an address.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from miles.core.errors import UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.environments import episodes
from miles.rollout.tools.environments.asking import MODEL, Desk
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_VERSIONS = "'verifiers>=0.1.12,<0.5'"
_Worth = tuple[float, dict[str, float]]


class VerifiersEnvironment:
    """``id`` and ``settings`` are for ``verifiers.load_environment``, whose result all attempts share.

    The prompt's metadata may hold ``answer``, ``info`` and ``task``, as rows of such environments do; the label is an
    answer too.
    What the environment does with a conversation it does itself: its stops, its tools and its rubric hold.

    From 0.4 on, ``id`` names a taskset and ``settings`` are those of an environment's config.
    """

    def __init__(self, id: str, *, settings: Mapping[str, Any] = EMPTY) -> None:
        self._id = id
        self._settings = settings
        self._package = _package()
        self._desk = Desk()
        self._reply: asyncio.Future[Message] | None = None
        self._seen = 0
        self._running: asyncio.Task[_Worth] | None = None

    async def open(self, prompt: Prompt) -> Opening:
        self._running = asyncio.create_task(self._played(prompt))
        request = await self._next()
        if request is None:
            raise EnvironmentFailed("the verifiers environment ended before it asked anything")
        return Opening(messages=request["messages"], tools=request.get("tools") or (), scores=True)

    async def step(self, reply: Message) -> Step:
        assert self._reply is not None and self._running is not None
        self._reply.set_result(reply)
        said = self._seen + 1  # what it was shown, and the reply
        request = await self._next()
        if request is None:
            reward, parts = self._running.result()
            return Step(reward=reward, parts=parts, done=True)
        if _goes_on(request["messages"], said, reply):
            return Step(messages=request["messages"][said:])
        return Step(messages=request["messages"], anew=True)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _next(self) -> Mapping[str, Any] | None:
        """The next request; None when the environment has ended. Raises what it raised."""
        assert self._running is not None
        asked = asyncio.create_task(self._desk.asked.get())
        try:
            await asyncio.wait({asked, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                self._running.result()
                return None
            request, self._reply = asked.result()
        finally:
            asked.cancel()
        self._seen = len(request["messages"])
        return request

    async def _played(self, prompt: Prompt) -> _Worth:
        if _has_episodes(self._package):
            return await episodes.episode(self._package, self._id, self._settings, prompt, self._desk)
        environment = _loaded(self._id, json.dumps(dict(self._settings), sort_keys=True))
        client = self._package.OpenAIChatCompletionsClient(self._desk.client("verifiers"))
        state = await environment.rollout(_row(prompt), client, MODEL, {})
        if isinstance(state.get("error"), self._package.EmptyModelResponseError):
            return 0.0, {}  # the policy said nothing at all, which is no failure of the environment's
        if state.get("error") is not None:
            raise EnvironmentFailed(f"the verifiers environment failed: {state['error']!r}")
        try:
            await environment.rubric.score_rollout(state)
        except AssertionError as error:  # which is how it refuses a rubric whose functions are of a whole group
            raise UsageError(
                f"The verifiers environment {self._id} cannot score an attempt by itself: {error}"
            ) from error
        await environment.rubric.cleanup(state)
        return float(state["reward"]), {name: float(value) for name, value in (state.get("metrics") or {}).items()}


def _row(prompt: Prompt) -> dict[str, Any]:
    row = {
        "prompt": [dict(message) for message in prompt.messages],
        "answer": prompt.metadata.get("answer", prompt.label or ""),
        "info": dict(prompt.metadata.get("info") or {}),
        "example_id": prompt.id,
    }
    # What a task is differs between versions (a route, a payload), so there is one only where the data has one.
    return row | ({"task": prompt.metadata["task"]} if "task" in prompt.metadata else {})


def _goes_on(messages: list[Message], said: int, reply: Message) -> bool:
    """Whether what is asked now begins with what was shown and answered."""
    return len(messages) > said and messages[said - 1].get("role") == "assistant" and _same(messages[said - 1], reply)


def _same(given: Message, reply: Message) -> bool:
    return (given.get("content") or "") == (reply.get("content") or "")


def _package() -> Any:
    """What has ``load_environment``: the package itself, or from 0.4 on its ``v1``."""
    verifiers = package("verifiers", environment="verifiers", install="miles-rl[environments]")
    if hasattr(verifiers, "load_environment") and hasattr(verifiers, "OpenAIChatCompletionsClient"):
        return verifiers
    newer = package("verifiers.v1", environment="verifiers", install=_VERSIONS)
    if not _has_episodes(newer):
        raise UsageError(
            f"This version of verifiers has environments of another kind than those that are known here; pip install "
            f"{_VERSIONS}."
        )
    return newer


def _has_episodes(verifiers: Any) -> bool:
    return hasattr(verifiers, "resolve_env_config")


@cache
def _loaded(id: str, settings: str) -> Any:
    try:
        return _package().load_environment(id, **json.loads(settings))
    except (ValueError, RuntimeError) as error:  # which is what it makes of all that goes wrong
        raise UsageError(f"The verifiers environment {id} cannot be loaded: {error}") from error
