"""A real HTTP server on loopback whose answers a test writes, faults included."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Asked:
    """One request as it arrived."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Fault:
    """What happens instead of a good answer."""

    status: int = 200
    raw: bytes | None = None
    hang_up: bool = False
    stall: bool = False


Answer = Callable[[Asked], Any]


@dataclass
class Served:
    """The server: its address, what it was asked, and how many at once at most."""

    url: str = ""
    asked: list[Asked] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0
    released: asyncio.Event = field(default_factory=asyncio.Event)


@asynccontextmanager
async def serving(answer: Answer, *, wait_for: Callable[[Served], Awaitable[None]] | None = None):
    """Serve ``answer`` until the block ends; ``wait_for`` holds each answer back until it returns."""
    served = Served()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (asked := await _read(reader)) is not None:
                served.asked.append(asked)
                served.at_once += 1
                served.most_at_once = max(served.most_at_once, served.at_once)
                if wait_for is not None:
                    await wait_for(served)
                given = answer(asked)
                fault = given if isinstance(given, Fault) else Fault(raw=json.dumps(given).encode())
                if fault.stall:
                    await served.released.wait()
                served.at_once -= 1
                if fault.hang_up:
                    return
                raw = fault.raw if fault.raw is not None else b"{}"
                head = f"HTTP/1.1 {fault.status} X\r\nContent-Length: {len(raw)}\r\n\r\n"
                writer.write(head.encode() + raw)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    served.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield served
    finally:
        served.released.set()
        server.close()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    if not head:
        return None
    first, *rest = head.decode().strip().split("\r\n")
    headers = {name.lower(): text.strip() for name, _, text in (line.partition(":") for line in rest)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(path=first.split()[1], headers=headers, body=json.loads(body) if body else None)
