"""A session server on an event loop in a thread, for clients that block; and engines whose words are known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx
import numpy as np

from miles.core.protocols import Completion, OnTokens, SamplingParams
from miles.core.types import Author, Span, Status, Tokens, Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.server.app import SessionServer

T = TypeVar("T")
TEMPLATE = """\
{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'

Words = Callable[[str, int], str]
"""What is said to a context, of which so many replies were given before."""


class Scripted:
    """An engine that says what ``words`` has it say, log-probs -1, -2, ... and a version that ``publish`` moves."""

    def __init__(self, tokenizer: HfTokenizer, words: Words) -> None:
        self._tokenizer, self._words = tokenizer, words
        self._end = tokenizer.encode("<|im_end|>")
        self.asked: list[tuple[list[int], SamplingParams]] = []
        self.wrote: list[list[int]] = []
        self.cancelled = 0
        self.version = Version()
        self.hold: asyncio.Event | None = None
        self.error: Exception | None = None
        self.abort = False

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images=()) -> Completion:
        return await self._generate(tokens, sampling, lambda tokens: None)

    async def _generate(self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens) -> Completion:
        kept, reason = self._drawn(tokens, sampling)
        try:
            await self._write(kept, on_tokens)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.wrote.append(kept)
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}[reason]
        return Completion(spans=tuple(self._spans(kept)), status=status, finish_reason=reason)

    def _drawn(self, tokens: Tokens, sampling: SamplingParams) -> tuple[list[int], str]:
        text = self._words(self._tokenizer.decode(tokens.tolist()), len(self.asked))
        self.asked.append((tokens.tolist(), sampling))
        if self.error is not None:
            raise self.error
        cut = min((text.find(stop) + len(stop) for stop in sampling.stop if stop in text), default=None)
        ids = [*self._tokenizer.encode(text), *self._end] if cut is None else self._tokenizer.encode(text[:cut])
        kept = ids[: sampling.max_new_tokens]
        return kept, "abort" if self.abort else "stop" if len(kept) == len(ids) else "length"

    async def _write(self, kept: Sequence[int], on_tokens: OnTokens) -> None:
        await (asyncio.sleep(0) if self.hold is None else self.hold.wait())

    def _spans(self, ids: Sequence[int]) -> Iterator[Span]:
        """Two spans, as of a reply during which the weights changed."""
        half, scores = len(ids) // 2, -np.arange(1, len(ids) + 1, dtype=np.float32)
        for a, b in ((0, half), (half, len(ids))):
            version = self.version if a == 0 else self.version.next()
            if b > a:
                tokens = np.array(ids[a:b], np.int32)
                yield Span(author=Author.POLICY, tokens=tokens, logprobs=scores[a:b].copy(), version=version)


class Speaking(Scripted):
    """The same engine, streaming token by token. With a ``gate`` it waits there before its last ``left`` tokens."""

    def __init__(self, tokenizer: HfTokenizer, words: Words) -> None:
        super().__init__(tokenizer, words)
        self.gate: asyncio.Event | None = None
        self.left = 4

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images=()
    ) -> Completion:
        return await self._generate(tokens, sampling, on_tokens)

    async def _write(self, kept: Sequence[int], on_tokens: OnTokens) -> None:
        await super()._write(kept, on_tokens)
        for i, token in enumerate(kept):
            if self.gate is not None and i == max(0, len(kept) - self.left):
                await self.gate.wait()
            on_tokens([token])
            await asyncio.sleep(0)


class Hosted:
    """A server, its loop, and the words tests need."""

    def __init__(self, make: Callable[[], SessionServer]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sessions", daemon=True)
        self._thread.start()
        self.server = self.call(self._made(make))
        self.port: int = self.call(self.server.start())
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.url, timeout=60)

    async def _made(self, make: Callable[[], SessionServer]) -> SessionServer:
        return make()

    def call(self, work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def on_loop(self, work: Callable[[], T]) -> T:
        async def run() -> T:
            return work()

        return self.call(run())

    def open(self, **body: Any) -> str:
        """A session's address."""
        response = self.http.post("/sessions", json=body)
        assert response.status_code == 201, response.text
        return response.json()["anthropic_base_url"]

    def trajectory(self, url: str) -> dict[str, Any]:
        response = self.http.get(f"{url}/trajectory")
        assert response.status_code == 200, response.text
        return response.json()

    def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop turn until something holds there."""

        async def wait() -> None:
            while not holds():
                await asyncio.sleep(0.001)

        self.call(wait(), 30)

    def close(self) -> None:
        self.http.close()
        self.call(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def hosted(tokenizer: HfTokenizer, engine: Any, **settings: Any) -> Iterator[Hosted]:
    """A server whose sessions ``engine`` answers."""
    renderer = build_renderer(tokenizer)
    host = Hosted(lambda: SessionServer(renderer, tokenizer.decode, engine=engine, **settings))
    try:
        yield host
    finally:
        host.close()


def policy_tokens(trajectory: dict[str, Any]) -> list[list[int]]:
    """What is trained on, branch by branch."""
    return [
        [token for span in branch["spans"] if span["author"] == "policy" for token in span["tokens"]]
        for branch in trajectory["branches"]
    ]


def all_tokens(trajectory: dict[str, Any]) -> list[list[int]]:
    return [[token for span in branch["spans"] for token in span["tokens"]] for branch in trajectory["branches"]]
