"""Profiles of servers by ``/start_profile`` and ``/stop_profile``, of ``miles serve`` and of stock SGLang alike.

    StepFinished n - 1 --> start on every server --> groups of step n are generated --> BatchTaken n --> stop

The requests are made one after the other in a thread, since a server writes its trace before it answers.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from miles.backends.remote.client import SglangClient
from miles.backends.remote.pool.engine_pool import EnginePool
from miles.cluster.profiler import ProfileSettings
from miles.core.events import BatchTaken, Event, RunEnded, RunStarted, StepFinished

_START_SECONDS, _STOP_SECONDS = 60.0, 600.0


class ServerProfiler:
    """An observer that profiles the servers of a run while the loop waits for the groups of a step.

    A server writes ``step-000003-rollout-engine-0-...-TP-0.trace.json.gz`` for each of its ranks to the folder of that
    name on its own machine. ``note`` is called with a sentence when a server does not profile itself.
    """

    def __init__(self, settings: ProfileSettings, note: Callable[[str], None]) -> None:
        self._settings = settings
        self._note = note
        self._pool: EnginePool | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="profile servers")
        self._profiled: list[SglangClient] = []
        self._is_running = False

    def connect(self, pool: EnginePool) -> None:
        """Profile the servers of this pool from now on."""
        self._pool = pool

    def __call__(self, event: Event) -> None:
        if isinstance(event, RunStarted | StepFinished):
            if self._settings.first <= event.step + 1 < self._settings.end:
                self._is_running = True
                self._thread.submit(self._start, event.step + 1)
        elif isinstance(event, BatchTaken | RunEnded) and self._is_running:
            self._is_running = False
            self._thread.submit(self._stop)

    def close(self) -> None:
        """Wait until the servers have written their traces."""
        if self._is_running:
            self._thread.submit(self._stop)
        self._thread.shutdown()

    def _start(self, step: int) -> None:
        folder = str(self._settings.folder.resolve())
        for slot in [] if self._pool is None else self._pool.serving():
            client = slot.client
            if client is None:
                continue
            body = {"output_dir": folder, "profile_prefix": format_prefix(step, slot.name)}
            if self._request(client, "/start_profile", body, _START_SECONDS):
                self._profiled.append(client)

    def _stop(self) -> None:
        profiled, self._profiled = self._profiled, []
        for client in profiled:
            self._request(client, "/stop_profile", {}, _STOP_SECONDS)

    def _request(self, client: SglangClient, path: str, body: Mapping[str, object], seconds: float) -> bool:
        headers = {**client.headers, "Content-Type": "application/json"}
        request = urllib.request.Request(f"{client.url}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=seconds):
                return True
        except urllib.error.HTTPError as error:
            why = error.read(500).decode(errors="replace").strip() or f"status {error.code}"
        except OSError as error:
            why = str(error)
        self._note(f"{client.name} has no profile of this step: {path} failed ({why})")
        return False


def format_prefix(step: int, server: str) -> str:
    """Return how the names of a server's traces begin.

    >>> format_prefix(3, "engine 0")
    'step-000003-rollout-engine-0'
    """
    return f"step-{step:06d}-rollout-{server.replace(' ', '-')}"
