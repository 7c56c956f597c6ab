"""One server behind HTTP: SGLang's native API, as stock SGLang and ``miles serve`` speak it; every wait has a deadline.

Answers are read as streams, so that what has come is there whatever becomes of the server. ``cut`` ends all that are
under way with what they have.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

import aiohttp

from miles.backends.sglang.reply import Denied, Reply, Unfit
from miles.core.errors import EngineError
from miles.core.protocols import Hear, Sampling

if find_spec("orjson") is None:
    loads = json.loads
else:  # the log-probs of an answer are a lot of JSON
    from orjson import loads

PauseMode = Literal["abort", "retract", "in_place"]
Kind = Literal["sglang", "miles"]

# Seconds in which a request that was aborted before it had a token says so.
_LATE = 0.5
# Seconds a connection of words is kept: fewer than any server keeps one.
_KEPT = 1.0
CONTROL_SECONDS = 60.0
"""What a server may take for a word that is no work: a pause, a flush, a question."""


class Lost(EngineError):
    """The server cannot be reached, fails, or is too late: another may be asked."""


class Cut(Lost):
    """The request was ended here, because its server is to take no more."""


class Distrusted(Lost):
    """What the server says cannot be right."""


class Refused(EngineError):
    """The server understands and says no: another would too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a server says of itself. ``seeded``: it draws by the seeds it is given."""

    kind: Kind
    model_path: str
    label: str
    ranks: int
    seeded: bool


class Client:
    """A connection to the server at ``url``, which errors call ``name``."""

    def __init__(self, url: str, name: str, *, token: str | None = None, vocabulary: int, routed: bool = False) -> None:
        self.url = url.rstrip("/")
        self.name = name
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._vocabulary = vocabulary
        self._routed = routed
        self._session: aiohttp.ClientSession | None = None
        self._words: aiohttp.ClientSession | None = None
        self._flying: dict[asyncio.Task[None], Reply] = {}
        self._facts: Facts | None = None
        self.sums = True
        """Whether the server may have checksums of its weights: until it was asked in vain."""

    # -- requests ---------------------------------------------------------------------------

    @property
    def flying(self) -> int:
        """Answers under way."""
        return len(self._flying)

    @property
    def keeps(self) -> bool:
        """Can requests stay with it while its weights change? Then it tells which weights drew which token."""
        return self._facts is not None and self._facts.kind == "miles"

    async def attempt(
        self, tokens: Sequence[int], sampling: Sampling, hear: Hear = lambda tokens: None
    ) -> tuple[Reply, Lost | None]:
        """Continue ``tokens``: what came, and why no more of it comes, where the server did not say.

        ``hear`` is told tokens as they come. Raises ``Refused`` where the request is what is wrong.
        """
        reply = Reply(vocabulary=self._vocabulary, limit=sampling.max_new_tokens)
        task = asyncio.create_task(self._stream(self._body(tokens, sampling), reply, hear))
        self._flying[task] = reply
        try:
            await asyncio.wait({task})
        finally:
            del self._flying[task]
            task.cancel()
        if task.cancelled():
            return reply, Cut(f"{self.name} had to let go of the request")
        error = task.exception()
        if isinstance(error, Lost):
            return reply, error
        if error is not None:
            raise error
        return reply, None

    def cut(self) -> None:
        """End all that is under way, with what it has."""
        for task in self._flying:
            task.cancel()

    async def drained(self, seconds: float) -> None:
        """Wait until nothing is under way at a server that was paused; what is after so long is cut.

        A request that got there behind the pause is answered after it. It has no token, and is not waited for.
        """
        if self._flying:
            await asyncio.wait(set(self._flying), timeout=min(seconds, _LATE))
        for task, reply in self._flying.items():
            if not reply.tokens:
                task.cancel()
        if self._flying:
            await asyncio.wait(set(self._flying), timeout=seconds)
        self.cut()
        if self._flying:
            await asyncio.wait(set(self._flying))

    async def finished(self, seconds: float) -> None:
        """Wait until nothing is under way at a server that goes on; what is after so long is cut."""
        if self._flying and seconds > 0:
            await asyncio.wait(set(self._flying), timeout=seconds)
        self.cut()
        if self._flying:
            await asyncio.wait(set(self._flying))

    def _body(self, tokens: Sequence[int], sampling: Sampling) -> dict[str, Any]:
        if sampling.ignore_eos and sampling.stop_token_ids:
            raise Refused(f"{self.name} looks at no stop token where the end of the sequence is ignored")
        drawn: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "max_new_tokens": sampling.max_new_tokens,
            "ignore_eos": sampling.ignore_eos,
        }
        if sampling.stop:
            drawn |= {"stop": list(sampling.stop), "no_stop_trim": True}
        if sampling.stop_token_ids:
            drawn["stop_token_ids"] = list(sampling.stop_token_ids)
        if self._facts is not None and self._facts.seeded:
            drawn["sampling_seed"] = sampling.seed
            if sampling.drawn and self._facts.kind == "miles":  # SGLang's randomness goes by a token's place as it is
                drawn["sampling_drawn"] = sampling.drawn
        body = {"input_ids": list(tokens), "sampling_params": drawn, "return_logprob": True, "stream": True}
        told = ("return_routed_experts", self._routed), ("return_weight_versions", self.keeps)
        return body | {name: True for name, wanted in told if wanted}

    async def _stream(self, body: dict[str, Any], reply: Reply, hear: Hear) -> None:
        try:
            async with self._open().post(f"{self.url}/generate", json=body) as response:
                if response.status != 200:
                    raise self._refusal("/generate", response.status, await response.text())
                async for event in _events(response.content):
                    known = len(reply.tokens)
                    reply.take(event)
                    hear(reply.tokens[known:])
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise Lost(f"{self.name} was lost ({_said(error)})") from error
        except Denied as error:
            raise Refused(f"{self.name} refused the request: {error}") from error
        except Unfit as error:
            raise Distrusted(f"{self.name} is not to be trusted: {error}") from error
        if reply.reason is None:
            raise Lost(f"{self.name} ended its answer in the middle")

    # -- control ----------------------------------------------------------------------------

    async def look(self, seconds: float = CONTROL_SECONDS) -> Facts:
        """Ask what it is; everything else may be asked afterwards."""
        paths = ("/server_info", "/model_info", "/v1/models")
        info, model, models = await asyncio.gather(*(self.ask("GET", path, seconds=seconds) for path in paths))
        try:
            kind: Kind = "miles" if models["data"][0]["owned_by"] == "miles" else "sglang"
            self._facts = Facts(
                kind=kind,
                model_path=str(model["model_path"]),
                label=str(model["weight_version"]),
                ranks=int(info.get("tp_size") or 1),
                seeded=kind == "miles" or bool(info.get("enable_deterministic_inference")),
            )
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise Lost(f"{self.name} at {self.url} does not answer as SGLang does ({_said(error)})") from error
        return self._facts

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Make no step from now on; requests are ended with what they have, set back, or kept."""
        await self.ask("POST", "/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self.ask("POST", "/continue_generation", {})

    async def abort(self) -> None:
        """End all requests with what they have."""
        await self.ask("POST", "/abort_request", {"abort_all": True}, behind=True)

    async def flush(self) -> bool:
        """Forget every prefix; false while requests hold some."""
        try:
            await self.ask("POST", "/flush_cache")
        except Refused:
            return False
        return True

    async def sleep(self, tags: Sequence[str] = ("kv_cache",)) -> None:
        """Give memory back: the cache's, and what else ``tags`` name."""
        await self.ask("POST", "/release_memory_occupation", {"tags": list(tags)})

    async def wake(self, tags: Sequence[str] = ("kv_cache",)) -> None:
        await self.ask("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def healthy(self, seconds: float, *, generate: bool) -> str | None:
        """Why it is not well, or None; ``generate``: well is a server that draws a token."""
        path = "/health_generate" if generate else "/health"
        try:
            await self.ask("GET", path, seconds=seconds)
        except EngineError as error:
            return str(error)
        return None

    async def server_info(self) -> Mapping[str, Any]:
        return await self.ask("GET", "/server_info")

    async def load(self) -> Mapping[str, float]:
        """Requests that run and wait."""
        told = await self.ask("GET", "/get_load")
        first = told[0] if isinstance(told, list) and told else {}
        return {name: float(value) for name, value in first.items() if name in ("num_reqs", "num_waiting_reqs")}

    # -- words ------------------------------------------------------------------------------

    async def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        data: bytes | None = None,
        seconds: float = CONTROL_SECONDS,
        behind: bool = False,
    ) -> Any:
        """One exchange; the JSON of the answer, or its text. A ``body`` of bytes is JSON already.

        ``behind`` goes the way of requests, so as not to overtake those that are still being sent.
        """
        kind = "application/json" if isinstance(body, bytes) else "application/octet-stream"
        if isinstance(body, bytes):
            body, data = None, body
        sent = {"data": data, "headers": {"Content-Type": kind}} if data is not None else {}
        try:
            async with asyncio.timeout(seconds):
                session = self._open() if behind else self._asking()
                async with session.request(method, f"{self.url}{path}", json=body, **sent) as response:
                    raw = await response.read()
        except TimeoutError as error:
            raise Lost(f"{self.name} did not answer {path} within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Lost(f"{self.name} was lost at {path} ({_said(error)})") from error
        told = _read(raw)
        if response.status >= 400 or (isinstance(told, dict) and told.get("success") is False):
            raise self._refusal(path, response.status, raw.decode(errors="replace"))
        return told

    def _refusal(self, path: str, status: int, text: str) -> EngineError:
        said = f"{self.name} answered {path} with status {status}: {_sentence(text)}"
        if status in (401, 403):
            return Refused(f"{said}; give its key with --rollout-engine-token-env")
        return Refused(said) if status < 500 else Lost(said)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # An answer may take as long as it takes: who watches the server cuts it off when it is stuck.
            limits = aiohttp.ClientTimeout(total=None, sock_connect=30)
            # A connection each: one that is kept may be closed by the server just when it is used again.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=limits, headers=self._headers
            )
        return self._session

    def _asking(self) -> aiohttp.ClientSession:
        """For words: those of a publication come within milliseconds, and share a connection while they do."""
        if self._words is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=30)
            kept = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEPT)
            self._words = aiohttp.ClientSession(connector=kept, timeout=limits, headers=self._headers)
        return self._words

    async def close(self) -> None:
        """Cut what is under way and let go of the connections."""
        await self.drained(0.0)
        for session in (self._session, self._words):
            if session is not None:
                await session.close()
        self._session = self._words = None


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[Any]:
    """The objects of a stream of events, up to its ``[DONE]``."""
    held = bytearray()
    async for chunk in content.iter_any():
        held += chunk
        *whole, rest = held.split(b"\n")
        held = bytearray(rest)
        for line in whole:
            word = bytes(line).strip().removeprefix(b"data:").strip()
            if word == b"[DONE]":
                return
            if word:
                try:
                    yield loads(word)
                except ValueError as error:
                    raise Unfit(f"its stream has {word[:60]!r} in it") from error


def _read(raw: bytes) -> Any:
    with suppress(ValueError):
        return loads(raw)
    return raw.decode(errors="replace")


def _sentence(text: str) -> str:
    """The words of an error's body."""
    value = _read(text.encode())
    for name in ("message", "error", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return (value if isinstance(value, str) else json.dumps(value)).strip()[:500].rstrip(".") or "without a word"


def _said(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
