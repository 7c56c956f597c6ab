"""``miles route``: route requests to several engines, until a signal."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from miles.cluster.router.config import RouterConfig
from miles.core.errors import UsageError
from miles.launch.runtime.http_service import API_KEY, find_key_problem, read_key, select_event_loop

if TYPE_CHECKING:
    from miles.cluster.router.router import Router

ENGINE_API_KEY = "MILES_ENGINE_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKeys:
    """The keys that clients send to the router and the router to the engines; None for none."""

    own: str | None
    engine: str | None


def route(config: RouterConfig, environ: Mapping[str, str] | None = None) -> int:
    """Route until SIGINT or SIGTERM, then finish requests in flight; a second signal ends at once."""
    keys = read_keys(config, os.environ if environ is None else environ)
    problems = list(check_options(config, keys))
    if problems:
        raise UsageError(problems)
    with asyncio.Runner(loop_factory=select_event_loop()) as runner:
        return runner.run(_serve(config, keys))


def read_keys(config: RouterConfig, environ: Mapping[str, str]) -> RouterKeys:
    """The keys, from files or the environment; a command line is visible to others."""
    own = read_key("--api-key-file", config.api_key_file, environ.get(API_KEY))
    engine = read_key("--engine-api-key-file", config.engine_api_key_file, environ.get(ENGINE_API_KEY))
    return RouterKeys(own=own, engine=engine or own)


def check_options(config: RouterConfig, keys: RouterKeys) -> Iterator[str]:
    """Problems of the options."""
    for module, package in (("httptools", "httptools"), ("prometheus_client", "prometheus-client")):
        if find_spec(module) is None:
            yield f"miles route needs {package}: pip install 'miles-rl[serve]'."
    for url in config.engine_urls:
        if not _is_engine_url(url):
            yield f"--engine-urls {url} is not the URL of an engine; write one like http://127.0.0.1:30000."
    if problem := find_key_problem(config.host, keys.own, allow_unauthenticated=config.allow_unauthenticated):
        yield problem
    if not config.health_check_endpoint.startswith("/"):
        yield f"--health-check-endpoint {config.health_check_endpoint} is not a path; write one like /health."
    if config.max_quarantine_secs < config.quarantine_secs:
        yield "--max-quarantine-secs is below --quarantine-secs; raise it."


def _is_engine_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False


async def _serve(config: RouterConfig, keys: RouterKeys) -> int:
    from miles.cluster.router.router import Router, raise_socket_limit

    limit = raise_socket_limit(2 * config.max_concurrent_requests + 1024)
    if limit < 2 * config.max_concurrent_requests:
        _print_error(f"This process may open {limit} sockets, enough for {limit // 2} requests at once (ulimit -n).")
    gc.freeze()  # exclude what is loaded from later collections
    router = Router(config, log=_print_error, key=keys.own, engine_key=keys.engine)
    try:
        port = await router.start()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise UsageError(
            f"--host {config.host} --port {config.port} is not available: {reason}; choose another."
        ) from None
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"Routing http://{host}:{port} to {len(config.engine_urls)} engines ({config.policy}).", flush=True)
    await _until_stopped(router, config.drain_timeout_secs)
    return 0


async def _until_stopped(router: Router, seconds: float) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    closing: asyncio.Task[None] | None = None

    def stop_on_signal() -> None:
        if closing is not None:
            closing.cancel()
        stop.set()

    for which in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(which, stop_on_signal)
    await stop.wait()
    _print_error("Finishing requests in flight; send the signal again to end at once.")
    closing = loop.create_task(router.close(seconds))
    await asyncio.wait([closing])
    if closing.cancelled():
        await router.close(0.0)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
