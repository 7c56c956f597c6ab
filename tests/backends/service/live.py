"""A training service on a free port over the small model, on a thread of its own, for as long as a test lasts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.backends.service.http_server import ServiceServer
from miles.backends.service.service import TrainingService
from miles.cluster.executor import ThreadExecutor
from miles.config.cli import parse
from miles.launch.build.service import build_service, build_tenants
from miles.launch.config import ServeRoot

TENANTS = """
[tenants.alice]
key = "tml-alice-key-of-sixteen"
[tenants.bob]
key = "tml-bob-key-of-sixteen"
"""
ALICE, BOB = "tml-alice-key-of-sixteen", "tml-bob-key-of-sixteen"


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveService:
    """A running service and its address."""

    service: TrainingService
    server: ServiceServer
    port: int
    loop: asyncio.AbstractEventLoop

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, coroutine: Any) -> Any:
        """The result of a coroutine on the service's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)


def read_config(model: Path, folder: Path, *flags: str) -> ServeRoot:
    result = parse(
        ServeRoot,
        [
            *("--hf-checkpoint", str(model), "--train", "--service-directory", str(folder), "--device", "cpu"),
            *("--engine-kv-tokens", "4096", "--service-coalesce-seconds", "0", *flags),
        ],
    )
    assert result.config is not None, result.problems
    return result.config


@contextmanager
def serving(model: Path, folder: Path, *flags: str, tenants: str | None = TENANTS) -> Iterator[LiveService]:
    """Serve ``model`` with its state in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    if tenants is not None:
        (folder / "tenants.toml").write_text(tenants)
        flags = ("--service-tenants", str(folder / "tenants.toml"), *flags)
    config = read_config(model, folder / "state", *flags)
    ready, stopped = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    async def run() -> None:
        executors = ThreadExecutor("engine"), ThreadExecutor("trainer")
        try:
            service, engine = await build_service(config, build_tenants(config, None), *executors)
            await service.start()
            server = ServiceServer(service, poll_seconds=2.0)
            port = await server.start()
            found["live"] = LiveService(service=service, server=server, port=port, loop=asyncio.get_running_loop())
        except BaseException as error:
            found["error"] = error
            raise
        finally:
            ready.set()
        await asyncio.to_thread(stopped.wait)
        await server.stop()
        await service.stop()
        await engine.close()
        for executor in executors:
            executor.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    ready.wait(120)
    if "live" not in found:
        raise RuntimeError("the service did not start") from found.get("error")
    try:
        yield found["live"]
    finally:
        stopped.set()
        thread.join(60)
