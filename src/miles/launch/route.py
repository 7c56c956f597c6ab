"""``miles route``: one address for several engines, until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from miles.cluster.route.config import RouteConfig
from miles.core.errors import UsageError

if TYPE_CHECKING:
    from miles.cluster.route.router import Router


KEY = "MILES_API_KEY"
ENGINE_KEY = "MILES_ENGINE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What clients show to the router, and the router to the engines; None for none."""

    own: str | None
    engine: str | None


def route(config: RouteConfig, environ: Mapping[str, str] | None = None) -> int:
    """Route until SIGINT or SIGTERM, then finish what is under way; a second signal ends at once."""
    keys = read_keys(config, os.environ if environ is None else environ)
    problems = list(wrong(config, keys))
    if problems:
        raise UsageError(problems)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_serve(config, keys))


def read_keys(config: RouteConfig, environ: Mapping[str, str]) -> Keys:
    """From files or the environment, never from the command line, which everyone on the machine can see."""
    own = _key("--api-key-file", config.api_key_file, environ.get(KEY))
    engine = _key("--engine-api-key-file", config.engine_api_key_file, environ.get(ENGINE_KEY))
    return Keys(own=own, engine=engine or own)


def wrong(config: RouteConfig, keys: Keys) -> Iterator[str]:
    """Everything that keeps these options from being served."""
    if find_spec("httptools") is None:
        yield "miles route needs httptools: pip install 'miles-rl[serve]'."
    for url in config.engine_urls:
        if not _is_engine_url(url):
            yield f"--engine-urls {url} is not the URL of an engine; write one like http://127.0.0.1:30000."
    if keys.own is None and not config.allow_unauthenticated and not _is_loopback(config.host):
        yield (
            f"--host {config.host} lets other machines in, and there is no key: give --api-key-file or {KEY}, "
            "or say --allow-unauthenticated."
        )
    if not config.health_check_endpoint.startswith("/"):
        yield f"--health-check-endpoint {config.health_check_endpoint} is not a path; write one like /health."
    if config.max_quarantine_secs < config.quarantine_secs:
        yield "--max-quarantine-secs must not be less than --quarantine-secs."


def _is_engine_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _key(flag: str, file: str | None, otherwise: str | None) -> str | None:
    if file is None:
        return otherwise or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"{flag} {file} cannot be read: {reason}.") from None
    if not key or not key.isprintable():
        raise UsageError(f"{flag} {file} holds no key; write one on its only line.")
    return key


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: it moves bytes about twice as fast."""
    if find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.Loop


async def _serve(config: RouteConfig, keys: Keys) -> int:
    from miles.cluster.route.router import Router, raise_socket_limit

    limit = raise_socket_limit(2 * config.max_concurrent_requests + 1024)
    if limit < 2 * config.max_concurrent_requests:
        _tell(f"This process may open {limit} sockets, enough for {limit // 2} requests at once (ulimit -n).")
    gc.freeze()  # what is there now stays: later collections need not look at it
    router = Router(config, tell=_tell, key=keys.own, engine_key=keys.engine)
    try:
        port = await router.start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UsageError(f"--host {config.host} --port {config.port} cannot be listened on: {reason}.") from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"Routing http://{host}:{port} to {len(config.engine_urls)} engines ({config.policy}).", flush=True)
    await _until_stopped(router, config.drain_timeout_secs)
    return 0


async def _until_stopped(router: Router, seconds: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    closing: asyncio.Task[None] | None = None

    def asked() -> None:
        if closing is not None:
            closing.cancel()
        stop.set()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, asked)
    await stop.wait()
    _tell("Finishing what is under way; once more to end at once.")
    closing = loop.create_task(router.close(seconds))
    await asyncio.wait([closing])
    if closing.cancelled():
        await router.close(0.0)


def _tell(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)
