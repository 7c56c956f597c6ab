"""``miles view`` serves the dashboard of runs until a signal; ``miles report`` writes it to one HTML file."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from miles.core.errors import UsageError
from miles.launch.config import ReportOptions, ViewOptions
from miles.launch.dashboard.build import build_api
from miles.launch.dashboard.html_report import build_report
from miles.launch.runtime.http_service import API_KEY, read_key
from miles.observe.dashboard.api import DashboardApi
from miles.observe.formatting import format_bytes
from miles.rollout.serving.http import find_own_address, is_loopback

_ANY_ADDRESS = ("0.0.0.0", "::", "")


def view(runs: Sequence[Path], options: ViewOptions, environ: Mapping[str, str] | None = None) -> int:
    """Serve the dashboard until SIGINT or SIGTERM."""
    if find_spec("aiohttp") is None:
        raise UsageError("miles view needs aiohttp: pip install 'miles-rl[dashboard]'.")
    token = choose_token(options, os.environ if environ is None else environ)
    api = build_api(runs)
    asyncio.run(serve_dashboard(api, options, token, announce=lambda url: print(f"Dashboard at {url}", flush=True)))
    return 0


def choose_token(options: ViewOptions, environ: Mapping[str, str]) -> str | None:
    """Return the token of a file or the environment, a new one where other machines can connect, or None."""
    given = read_key("--api-key-file", options.api_key_file, environ.get(API_KEY))
    return given or (None if is_loopback(options.host) else secrets.token_urlsafe(24))


async def serve_dashboard(
    api: DashboardApi, options: ViewOptions, token: str | None, *, announce: Callable[[str], None]
) -> None:
    """Serve until SIGINT or SIGTERM; ``announce`` is called with the address once it answers."""
    from aiohttp import web

    from miles.launch.dashboard.app import build_app
    from miles.rollout.serving.http_runner import build_runner

    runner = build_runner(build_app(api, token=token))
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise UsageError(
                f"--host {options.host} --port {options.port} is not available: {reason}; choose another."
            ) from None
        announce(format_address(options.host, runner.addresses[0][1], token))
        stop = asyncio.Event()
        for which in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(which, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def format_address(host: str, port: int, token: str | None) -> str:
    """Return the address to open; one that stands for all addresses is replaced by this machine's own.

    >>> format_address("127.0.0.1", 8050, None), format_address("::1", 8050, "abc")
    ('http://127.0.0.1:8050/', 'http://[::1]:8050/?token=abc')
    """
    name = find_own_address() if host in _ANY_ADDRESS else host
    place = f"[{name}]" if ":" in name else name
    return f"http://{place}:{port}/" + (f"?token={token}" if token else "")


def report(runs: Sequence[Path], options: ReportOptions) -> int:
    """Write the report, complete or not at all."""
    api = build_api(runs)
    output = Path(options.output) if options.output is not None else Path(f"{runs[0].resolve().name}.html")
    text = build_report(api, max_trajectories=options.max_trajectories).encode()
    part = output.with_name(f"{output.name}.part")
    part.write_bytes(text)
    part.rename(output)
    print(f"{output} ({format_bytes(len(text))})")
    return 0
