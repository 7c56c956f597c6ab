"""HTTP helpers of both servers: JSON encoding, server-sent events (SSE), origin and API-key checks."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Mapping
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any, NoReturn
from urllib.parse import urlsplit

from miles.rollout.serving.errors import RequestError

SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
MAX_JSON_DEPTH = 128
CONNECTION_SECONDS = 60.0
"""How long a connection may take to send the head of its next request."""
BODY_SECONDS = 60.0
MIN_BODY_RATE = 64 << 10
"""A body may take ``BODY_SECONDS``, and longer if that many bytes arrive each second."""
MAX_TEXT_PER_TOKEN = 64
"""A text with more characters than this for each token of the context is refused before it is tokenized."""
SSE_DONE = b"data: [DONE]\n\n"
SSE_KEEPALIVE = b": working\n\n"
"""An SSE comment: clients ignore it, and it keeps an idle connection open."""

_encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

if find_spec("orjson") is None:

    def dump_json(value: Any, /) -> bytes:
        """Compact JSON; a value JSON cannot express is written as its text."""
        return _encode(value).encode()

else:  # eight times as fast; the log-probs of a reply are a lot of JSON
    import orjson

    def dump_json(value: Any, /) -> bytes:
        """Compact JSON; a value JSON cannot express is written as its text."""
        try:
            return orjson.dumps(value)
        except TypeError:  # orjson rejects integers over 64 bits, which JSON allows
            return _encode(value).encode()


def load_json(body: bytes) -> Any:
    """Parse strict JSON in UTF-8: no NaN or Infinity, no deep nesting, no lone surrogate, which cannot be encoded."""
    try:
        value = json.loads(body.decode("utf-8-sig"), parse_constant=_reject_constant)
        if b"\\ud" in body or b"\\uD" in body:  # an escape may be half of a surrogate pair
            json.dumps(value, ensure_ascii=False).encode()
        if _is_deeper(value, MAX_JSON_DEPTH):
            raise RecursionError
    except RecursionError as error:
        raise RequestError("The body is not valid JSON: it is nested too deeply.", malformed=True) from error
    except ValueError as error:
        raise RequestError(f"The body is not valid JSON: {error}.", malformed=True) from error
    return value


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than ``depth`` times."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        if not level:
            return False
        members = (each.values() if isinstance(each, dict) else each for each in level)
        level = [member for each in members for member in each if isinstance(member, dict | list)]
    return bool(level)


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def format_event(value: dict[str, Any], *, named: bool = False) -> bytes:
    """One server-sent event; ``named`` writes its ``type`` as the event name (Anthropic, OpenAI responses)."""
    head = b"event: " + str(value["type"]).encode() + b"\n" if named else b""
    return head + b"data: " + dump_json(value) + b"\n\n"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def find_own_address() -> str:
    """The address under which other machines reach this one; the loopback address where there is no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; it picks the interface of the default route
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


async def read_chunks(chunks: AsyncIterator[bytes], max_bytes: int, limit: str) -> bytes:
    """A request body of at most ``max_bytes``, the ``limit`` for error messages; a client that sends it too slowly is
    cut off."""
    loop, body = asyncio.get_running_loop(), bytearray()
    start = loop.time()
    try:
        async with asyncio.timeout(BODY_SECONDS) as deadline:
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise RequestError(f"The body is larger than {limit}.", status=413)
                deadline.reschedule(start + BODY_SECONDS + len(body) / MIN_BODY_RATE)
    except TimeoutError:
        message = f"The body came too slowly: {len(body)} bytes in {loop.time() - start:.0f} seconds."
        raise RequestError(message, status=408) from None
    return bytes(body)


def is_cross_origin(headers: Mapping[str, str]) -> bool:
    """Whether a browser sends this request for another site's page (CSRF) or under a foreign host name (DNS rebinding).

    An IP address cannot be rebound to another server; a name can. A browser that loads an image or follows a link
    sends no Origin, but Sec-Fetch-Site.
    """
    if headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
        return True
    host = headers.get("Host", "")
    try:
        if "Origin" in headers and urlsplit(headers["Origin"]).netloc != host:
            return True
        name = urlsplit(f"//{host}").hostname or ""
        return name != "localhost" and not ip_address(name)
    except ValueError:
        return True


def has_valid_key(headers: Mapping[str, str], key: str) -> bool:
    """Whether the request carries the API key, as a bearer token or in Anthropic's ``x-api-key``."""
    scheme, _, token = headers.get("Authorization", "").partition(" ")
    sent = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
    # aiohttp decodes bytes that are not UTF-8 to lone surrogates.
    return secrets.compare_digest(sent.encode("utf-8", "surrogateescape"), key.encode())
