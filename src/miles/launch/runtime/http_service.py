"""HTTP services, ``miles serve`` and ``miles route``: their API keys and their event loop."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec

from miles.launch.rules.paths import read_key_file
from miles.rollout.serving.http import is_loopback

API_KEY = "MILES_API_KEY"


def read_key(flag: str, file: str | None, otherwise: str | None) -> str | None:
    """The key in the file of ``flag``, or the one of the environment; a command line is visible to others."""
    return otherwise or None if file is None else read_key_file(flag, file)


def find_key_problem(host: str, key: str | None, *, allow_unauthenticated: bool) -> str | None:
    """Why a server may not listen on ``host``: other machines can reach it, and it has no key."""
    if key is not None or allow_unauthenticated or is_loopback(host):
        return None
    return (
        f"--host {host} is reachable from other machines, but there is no key: give --api-key-file or {API_KEY}, or "
        "--allow-unauthenticated."
    )


def select_event_loop() -> type[asyncio.AbstractEventLoop] | None:
    """The event loop of uvloop, if it is installed: it is about twice as fast."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.Loop
