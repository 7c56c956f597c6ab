"""Chat-completion requests of a third-party program, answered by the policy: in process, or over HTTP.

::

    program --chat completion--> client | address --> PolicyRequests.queue --> the multi-turn loop
            <--reply-----------                   <-- its future           <--
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from miles.rollout.tools.environment import import_package
from miles.rollout.tools.tool import Message

MODEL = "policy"
_SHUTDOWN_SECONDS = 1.0  # for open connections


class PolicyRequests:
    """Requests that wait for replies; ``queue`` holds a request's body and the future of its reply."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[Mapping[str, Any], asyncio.Future[Message]]] = asyncio.Queue()
        self._pending: set[asyncio.Future[Message]] = set()

    async def reply(self, body: Mapping[str, Any]) -> Message:
        """Queue a request and await its reply."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._pending.add(reply)
        try:
            await self.queue.put((body, reply))
            return await reply
        finally:
            self._pending.discard(reply)

    def client(self, environment: str) -> Any:
        """OpenAI's client over a transport that leads here instead of to a network."""
        httpx = import_package("httpx", environment=environment, install="httpx")
        openai = import_package("openai", environment=environment, install="openai")

        async def answer(request: Any) -> Any:
            return httpx.Response(200, json=completion(await self.reply(json.loads(request.content))))

        http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
        return openai.AsyncOpenAI(
            api_key="none", base_url="http://policy.invalid/v1", http_client=http, max_retries=0, timeout=None
        )

    @asynccontextmanager
    async def serve(self, environment: str) -> AsyncIterator[str]:
        """Serve chat completions on a local address until the context exits."""
        web = import_package("aiohttp.web", environment=environment, install="miles-rl[serve]")

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
            for reply in self._pending:
                reply.cancel()
            await runner.cleanup()


def completion(reply: Message) -> dict[str, Any]:
    """Format a reply as a chat completion."""
    message = {"role": "assistant", "content": reply.get("content"), **_calls(reply)}
    choice = {"index": 0, "message": message, "finish_reason": _reason(reply)}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {**_head("chat.completion"), "choices": [choice], "usage": usage}


def _events(reply: Message) -> str:
    """Format a reply as a stream of one chunk."""
    calls = [{**call, "index": index} for index, call in enumerate(_calls(reply).get("tool_calls", ()))]
    delta = {"role": "assistant", "content": reply.get("content"), **({"tool_calls": calls} if calls else {})}
    choices = (
        {"index": 0, "delta": delta, "finish_reason": None},
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
