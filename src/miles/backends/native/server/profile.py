"""``/start_profile`` and ``/stop_profile``: a PyTorch profile of this server, as a Chrome trace on its machine."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from aiohttp import web

from miles.backends.native.server.admin_bodies import StartProfileBody, StopProfileBody
from miles.cluster.profiler import export_profile, start_profile
from miles.rollout.serving.errors import RequestError

if TYPE_CHECKING:
    import torch


class ProfileApi:
    """Each method is one endpoint. A trace has the operators and kernels of this process, which is rank 0."""

    def __init__(self) -> None:
        self._running: tuple[torch.profiler.profile, Path] | None = None

    async def start(self, body: StartProfileBody) -> web.Response:
        """Start a profile; it is written when it is stopped."""
        if self._running is not None:
            raise RequestError("A profile is running already; stop it first with /stop_profile.")
        folder = Path(tempfile.gettempdir() if body.output_dir is None else body.output_dir)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or "it cannot be made"
            raise RequestError(f"output_dir is {str(folder)!r}: {reason}.", param="output_dir") from error
        parts = [body.profile_prefix, body.profile_id or str(time.time()), "TP-0"]
        path = folder / ("-".join(part for part in parts if part) + ".trace.json.gz")
        self._running = start_profile(), path
        return web.Response(text="Start profiling.\n")

    async def stop(self, body: StopProfileBody) -> web.Response:
        """Stop the profile, and return when its trace is written; requests are served meanwhile."""
        if self._running is None:
            raise RequestError("No profile is running; start one with /start_profile.")
        profile, path = self._running
        profile.stop()
        try:
            await asyncio.to_thread(export_profile, profile, path)
        except (OSError, RuntimeError) as error:
            raise RequestError(f"The trace {path} could not be written: {error}.", status=500) from error
        finally:
            self._running = None
        return web.Response(text=f"Stop profiling. The trace is {path}.\n")
