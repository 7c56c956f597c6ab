"""Servers to talk to: ours in a thread of this process, stock SGLang in a process of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, TypeVar

import httpx
from tests.server_api.exchange import events_of

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.app import EngineServer
from miles.cluster.executor import ThreadExecutor
from miles.launch.commands.serve import build_server, read_serve_config

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
STUB = Path(__file__).parent / "sglang_stub"
STARTS_WITHIN = 600.0
Kind = Literal["miles", "sglang"]
T = TypeVar("T")


class Hosted:
    """Our server and its engine, on an event loop in a thread; ``call`` runs something on that loop."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._run = ThreadExecutor("engine")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server", daemon=True)
        self._thread.start()
        config = read_serve_config([str(folder), "--device", "cpu", *flags])
        self.server: EngineServer
        self.engine: NativeEngine
        self.server, self.engine = self.call(build_server(config, None, self._run))
        self.port: int = self.call(self.server.start("127.0.0.1", 0))

    def call(self, work: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        self.call(self.server.stop())
        self.call(self.engine.close())
        self._run.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Wire:
    """A client of one server, with the words tests need. ``hosted`` is there if the server is ours."""

    def __init__(self, kind: Kind, url: str, folder: Path, hosted: Hosted | None = None) -> None:
        self.kind: Kind = kind
        self.url = url
        self.folder = folder
        self.hosted = hosted
        # SGLang hangs up after an error of its own; a connection each keeps that from the next request.
        self.http = httpx.Client(base_url=url, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))

    def post(self, path: str, body: Any = None) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body)

    def ok(self, path: str, **body: Any) -> Any:
        """POST; the JSON of a reply that must be 200."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json() if response.content else None

    def generate(self, **body: Any) -> Any:
        return self.ok("/generate", **body)

    def get_json(self, path: str) -> Any:
        """GET; the JSON of a reply that must be 200."""
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    def events(self, path: str, **body: Any) -> list[Any]:
        """All events of a stream that must begin with 200."""
        response = self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def until(self, holds: Any, seconds: float = 60.0) -> None:
        """Ask again and again until something holds."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came to hold"
            time.sleep(0.01)

    def busy(self) -> bool:
        """Does the server hold a request?"""
        return self.get_json("/get_load")[0]["num_reqs"] > 0


@contextmanager
def miles(folder: Path, *flags: str, kv_tokens: int = 8192) -> Iterator[Wire]:
    """Our server."""
    hosted = Hosted(folder, "--served-model-name", "tiny", "--engine-kv-tokens", str(kv_tokens), *flags)
    try:
        yield Wire("miles", f"http://127.0.0.1:{hosted.port}", folder, hosted)
    finally:
        hosted.close()


@contextmanager
def sglang(folder: Path, log: Path, *flags: str) -> Iterator[Wire]:
    """Stock SGLang from its own environment, on the CPU, without its compiled kernels."""
    assert PYTHON.exists(), "SGLang is not installed for tests; run make test-sglang"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(folder), "--served-model-name", "tiny"]
    words += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--port", str(port)]
    words += ["--host", "127.0.0.1", "--max-total-tokens", "8192", "--enable-metrics", "--tool-call-parser", "qwen"]
    words += ["--sleep-on-idle"]  # or its scheduler takes a whole core all the time
    words += ["--disable-overlap-schedule"]  # with it, penalties count a token one step late
    more = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUB), "OMP_NUM_THREADS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*words, *flags],
            env=os.environ | more,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=_die_with_us if sys.platform == "linux" else None,
        )
        try:
            wire = Wire("sglang", f"http://127.0.0.1:{port}", folder)
            _await_health(wire, process, log)
            yield wire
        finally:
            _end(process, out)


def _die_with_us() -> None:
    """Ask the kernel to kill this process when the one that started it is gone, however it went."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _await_health(wire: Wire, process: subprocess.Popen[bytes], log: Path) -> None:
    def healthy() -> bool:
        assert process.poll() is None, f"SGLang ended while it started: {log.read_text()[-2000:]}"
        try:
            return wire.http.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    wire.until(healthy, STARTS_WITHIN)


def _end(process: subprocess.Popen[bytes], out: IO[str]) -> None:
    """It drains for ten seconds on SIGTERM; nobody waits for it here."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    out.flush()
