"""JSON over HTTP with bounded concurrency, timeouts and retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import httpx

from miles.rollout.reward.context import HTTPEndpoint
from miles.rollout.reward.types import GradingError, NonRetryableError

Trace = Callable[[str, Mapping[str, Any]], Awaitable[None]]

_MAX_RESPONSE_BYTES = 16 << 20  # bytes
_RETRYABLE_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})


class JSONClient:
    """Client of one endpoint. It belongs to the event loop it is first used in, and reopens in another.

    ``url`` is the base of the paths, by default the endpoint's; a response of ``max_bytes`` or more is refused.
    """

    def __init__(self, endpoint: HTTPEndpoint, *, url: str | None = None, max_bytes: int = _MAX_RESPONSE_BYTES) -> None:
        self._endpoint = endpoint
        self._url = (url or endpoint.url).rstrip("/")
        self._max_bytes = max_bytes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._http: httpx.AsyncClient
        self._slots: asyncio.Semaphore

    async def post(self, path: str, body: Any) -> Any:
        """Send a POST and return the response's JSON; ``GradingError`` after the last retry."""
        return await self._send_with_retries("POST", path, body)

    async def get(self, path: str) -> Any:
        """Send a GET and return the response's JSON."""
        return await self._send_with_retries("GET", path, None)

    async def _send_with_retries(self, method: str, path: str, body: Any) -> Any:
        if asyncio.get_running_loop() is not self._loop:
            self._open()
        pause = self._endpoint.pause
        for left in range(self._endpoint.retries, -1, -1):
            try:
                async with self._slots, asyncio.timeout(self._endpoint.seconds):
                    return await self._send(method, self._url + path, body)
            except (httpx.HTTPError, TimeoutError, ValueError) as error:
                if left == 0:
                    raise GradingError(f"{self._url}{path} {_describe(error, self._endpoint.seconds)}") from error
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("the last try returns or raises")

    def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        token = self._endpoint.token
        headers: Mapping[str, str] = {} if token is None else {"Authorization": f"Bearer {token}"}
        limits = httpx.Limits(max_connections=self._endpoint.concurrency)
        # The user named the endpoint; proxies of the environment are for other traffic.
        self._http = httpx.AsyncClient(headers=headers, timeout=None, limits=limits, trust_env=False)
        self._slots = asyncio.Semaphore(self._endpoint.concurrency)

    async def _send(self, method: str, url: str, body: Any) -> Any:
        """Send, and resend at once when a kept-alive connection turns out to be closed: that request was not seen."""
        while True:
            reused = True

            async def trace(event: str, _: Mapping[str, Any]) -> None:
                nonlocal reused
                reused = reused and event != "connection.connect_tcp.started"

            try:
                return await self._send_once(method, url, body, trace)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # A failed connection is dropped from the pool, so the last try uses a new one.
                if not reused:
                    raise

    async def _send_once(self, method: str, url: str, body: Any, trace: Trace) -> Any:
        async with self._http.stream(method, url, json=body, extensions={"trace": trace}) as response:
            body_bytes = bytearray()
            async for chunk in response.aiter_bytes():
                body_bytes += chunk
                if len(body_bytes) > self._max_bytes:
                    raise NonRetryableError(f"{url} answered with more than {self._max_bytes >> 20} MiB")
        if response.status_code in _RETRYABLE_STATUS:
            response.raise_for_status()
        if not response.is_success:
            text = bytes(body_bytes[:200]).decode(errors="replace").strip()
            raise NonRetryableError(f"{url} answered with status {response.status_code} ({text})")
        return json.loads(bytes(body_bytes))


def _describe(error: Exception, seconds: float) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"answered with status {error.response.status_code}"
    if isinstance(error, TimeoutError):
        return f"did not answer within {seconds:g} s"
    if isinstance(error, ValueError):
        return "answered with something that is not JSON"
    return f"could not be reached ({type(error).__name__}: {error})"
