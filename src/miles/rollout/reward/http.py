"""Ask a server: JSON over HTTP, a few requests at once, repeated when they fail, never for ever."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from miles.rollout.reward.means import Server
from miles.rollout.reward.score import GradingError, Refused

Trace = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_LONGEST_ANSWER = 16 << 20  # bytes
_WORTH_REPEATING = frozenset({408, 425, 429, 500, 502, 503, 504})


class Client:
    """Asks one server. It belongs to the event loop it is first used in, and starts anew in another.

    ``url`` is what paths are added to, the server's own when not given; no answer is ``longest`` bytes or more.
    """

    def __init__(self, server: Server, *, url: str | None = None, longest: int = _LONGEST_ANSWER) -> None:
        self._server = server
        self._url = (url or server.url).rstrip("/")
        self._longest = longest
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient
        self._free: asyncio.Semaphore

    async def post(self, path: str, body: Any) -> Any:
        """The answer's JSON; ``GradingError`` when it has not come after every repetition."""
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> Any:
        """The same of a question without a body."""
        return await self._ask("GET", path, None)

    async def _ask(self, method: str, path: str, body: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            self._open()
        pause = self._server.pause
        for left in range(self._server.retries, -1, -1):
            try:
                async with self._free, asyncio.timeout(self._server.seconds):
                    return await self._heard(method, self._url + path, body)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                if left == 0:
                    raise GradingError(f"{self._url}{path} {_said(error, self._server.seconds)}") from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        token = self._server.token
        headers: Mapping[str, str] = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=self._server.concurrency)
        # The user named the server; a proxy in the environment is for other traffic.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False)
        self._free = asyncio.Semaphore(self._server.concurrency)

    async def _heard(self, method: str, url: str, body: Any) -> Any:
        """Ask, and again at once where a connection kept from before turns out to be dropped: nobody heard that."""
        while True:
            kept = True

            async def trace(event: str, _: Mapping[str, Any]) -> None:
                nonlocal kept
                kept = kept and event != "connection.connect_tcp.started"

            try:
                return await self._once(method, url, body, trace)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # Each that fails is kept no longer, so the last try is on a new one.
                if not kept:
                    raise

    async def _once(self, method: str, url: str, body: Any, trace: Trace) -> Any:
        async with self._http.stream(method, url, json=body, extensions={"trace": trace}) as response:
            read = bytearray()
            async for piece in response.aiter_bytes():
                read += piece
                if len(read) > self._longest:
                    raise Refused(f"{url} answered with more than {self._longest >> 20} MiB")
        if response.status_code in _WORTH_REPEATING:
            response.raise_for_status()
        if not response.is_success:
            said = bytes(read[:200]).decode(errors="replace").strip()
            raise Refused(f"{url} answered with status {response.status_code} ({said})")
        return json.loads(bytes(read))


def _said(error: Exception, seconds: float) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answered with status {error.response.status_code}"
    if isinstance(error, TimeoutError):
        return f"did not answer within {seconds:g} s"
    if isinstance(error, ValueError):
        return "answered with something that is not JSON"
    return f"could not be asked ({type(error).__name__}: {error})"
