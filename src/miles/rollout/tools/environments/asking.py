"""Requests of a program that believes it speaks to a model, handed to whoever answers them: in process, or over HTTP.

::

    program --chat completion--> client | address --> Desk.asked --> whoever answers
            <--reply-----------                   <-- its future  <--
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles.rollout.tools.environments.package import package
from miles.rollout.tools.tool import Message

MODEL = "policy"
_SHUTDOWN_SECONDS = 1.0  # for connections that nobody answers any more


class Desk:
    """Where requests wait for their replies; ``asked`` holds a request's body and the future of its reply."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[Message]]] = asyncio.Queue()
        self._open: set[asyncio.Future[Message]] = set()

    async def reply(self, body: Mapping[str, Any]) -> Message:
        """Ask, and wait for the answer."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._open.add(reply)
        try:
            await self.asked.put((body, reply))
            return await reply
        finally:
            self._open.discard(reply)

    def client(self, environment: str) -> Any:
        """OpenAI's own client, over a transport that leads here instead of to a network."""
        httpx = package("httpx", environment=environment, install="httpx")
        openai = package("openai", environment=environment, install="openai")

        async def answer(request: Any) -> Any:
            return httpx.Response(200, json=completion(await self.reply(json.loads(request.content))))

        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        return openai.AsyncOpenAI(
            api_key="none", base_url="http://policy.invalid/v1", http_client=http, max_retries=0, timeout=None
        )

    @asynccontextmanager
    async def served(self, environment: str) -> AsyncIterator[str]:
        """An address on this machine alone, where chat completions are asked for; it is gone afterwards."""
        web = package("aiohttp.web", environment=environment, install="miles-rl[serve]")

        async def answer(request: Any) -> Any:
            body = await request.json()
            reply = await self.reply(body)
            if body.get("stream"):
                return web.Response(text=_events(reply), content_type="text/event-stream")
            return web.json_response(completion(reply))

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app, shutdown_timeout=_SHUTDOWN_SECONDS, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            for reply in self._open:
                reply.cancel()
            await runner.cleanup()


def completion(reply: Message) -> dict[str, Any]:
    """A reply as the answer to a request."""
    message = {"role": "assistant", "content": reply.get("content"), **_calls(reply)}
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply)}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {**_head("chat.completion"), "choices": [choice], "usage": usage}


def _events(reply: Message) -> str:
    """The same as a stream of one piece."""
    calls = [{**call, "index": index} for index, call in enumerate(_calls(reply).get("tool_calls", ()))]
    said = {"role": "assistant", "content": reply.get("content"), **({"tool_calls": calls} if calls else {})}
    choices = (
        {"index": 0, "delta": said, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _reason(reply)},
    )
    pieces = [json.dumps({**_head("chat.completion.chunk"), "choices": [choice]}) for choice in choices]
    return "".join(f"data: {piece}\n\n" for piece in (*pieces, "[DONE]"))


def _head(kind: str) -> dict[str, Any]:
    return {"id": MODEL, "object": kind, "created": 0, "model": MODEL}


def _reason(reply: Message) -> str:
    return "tool_calls" if reply.get("tool_calls") else "stop"


def _calls(reply: Message) -> dict[str, Any]:
    return {"tool_calls": list(reply["tool_calls"])} if reply.get("tool_calls") else {}
