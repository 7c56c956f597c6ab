"""Environments of the package ``verifiers``: they drive the conversation themselves, so here the door is turned round.

::

    open   --starts-->  env.rollout(row, client) --asks--> our client --messages--> open returns them
    step   --reply---->                          <-reply-- our client
           <-messages-  ... asks again, or ends, is scored by its rubric, and step says done

The client is OpenAI's own, over a transport that hands each request to the loop instead of to a network.
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
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_NAME = "policy"


class VerifiersEnvironment:
    """``id`` and ``settings`` are for ``verifiers.load_environment``, whose result all attempts share.

    The prompt's metadata may hold ``answer`` and ``info``, as rows of such environments do; the label is an answer too.
    What the environment does with a conversation it does itself: its stops, its tools and its rubric hold.
    """

    def __init__(self, id: str, *, settings: Mapping[str, Any] = EMPTY) -> None:
        self._package = package("verifiers", environment="verifiers", install='"verifiers<0.4"')
        if not hasattr(self._package, "load_environment"):
            raise UsageError(
                "This version of verifiers has no load_environment, since its environments run agents of their own; "
                "pip install 'verifiers<0.4', or run them with an agent function."
            )
        self._environment = _loaded(id, json.dumps(dict(settings), sort_keys=True))
        self._asked: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[Message]]] = asyncio.Queue()
        self._reply: asyncio.Future[Message] | None = None
        self._seen = 0
        self._running: asyncio.Task[Mapping[str, Any]] | None = None

    async def open(self, prompt: Prompt) -> Opening:
        row: dict[str, Any] = {
            "prompt": [dict(message) for message in prompt.messages],
            "answer": prompt.metadata.get("answer", prompt.label or ""),
            "info": dict(prompt.metadata.get("info") or {}),
            "task": str(prompt.metadata.get("task", "default")),
            "example_id": prompt.id,
        }
        self._running = asyncio.create_task(self._rollout(row))
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
            state = self._running.result()
            metrics = {name: float(value) for name, value in (state.get("metrics") or {}).items()}
            return Step(reward=float(state["reward"]), parts=metrics, done=True)
        if _goes_on(request["messages"], said, reply):
            return Step(messages=request["messages"][said:])
        return Step(messages=request["messages"], anew=True)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _next(self) -> Mapping[str, Any] | None:
        """The next request; None when the rollout has ended. Raises what it raised."""
        assert self._running is not None
        asked = asyncio.create_task(self._asked.get())
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

    async def _rollout(self, row: dict[str, Any]) -> Mapping[str, Any]:
        client = _client(self._package, self._asked)
        state = await self._environment.rollout(row, client, _NAME, {})
        if state.get("error") is not None:
            raise EnvironmentFailed(f"the verifiers environment failed: {state['error']}")
        await self._environment.rubric.score_rollout(state)
        return state


def _goes_on(messages: list[Message], said: int, reply: Message) -> bool:
    """Whether what is asked now begins with what was shown and answered."""
    return len(messages) > said and messages[said - 1].get("role") == "assistant" and _same(messages[said - 1], reply)


def _same(given: Message, reply: Message) -> bool:
    return (given.get("content") or "") == (reply.get("content") or "")


@cache
def _loaded(id: str, settings: str) -> Any:
    made = package("verifiers", environment="verifiers", install='"verifiers<0.4"')
    return made.load_environment(id, **json.loads(settings))


def _client(verifiers: Any, asked: asyncio.Queue[Any]) -> Any:
    """OpenAI's client, in the wrapping that versions with clients of their own want."""
    httpx = package("httpx", environment="verifiers", install="httpx")
    openai = package("openai", environment="verifiers", install="openai")

    async def answer(request: Any) -> Any:
        body = json.loads(request.content)
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        await asked.put((body, reply))
        return httpx.Response(200, json=_completion(await reply))

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    client = openai.AsyncOpenAI(
        api_key="none", base_url="http://policy.invalid/v1", http_client=http, max_retries=0, timeout=None
    )
    has_clients = hasattr(verifiers, "OpenAIChatCompletionsClient")  # since 0.1.10
    return verifiers.OpenAIChatCompletionsClient(client) if has_clients else client


def _completion(reply: Message) -> dict[str, Any]:
    message = {"role": "assistant", "content": reply.get("content"), **_calls(reply)}
    return {
        "id": "policy",
        "object": "chat.completion",
        "created": 0,
        "model": _NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if _calls(reply) else "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


def _calls(reply: Message) -> dict[str, Any]:
    return {"tool_calls": list(reply["tool_calls"])} if reply.get("tool_calls") else {}
