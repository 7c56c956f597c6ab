"""Server on a node of a Ray cluster: an actor starts its process there, and reports its address.

The run sends it HTTP requests like any other. The actor ends with the run, and the server with the actor; when the node
is lost, the server is started on another node.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import sys
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from miles.backends.remote.client import ServerLost, SglangClient
from miles.backends.remote.process.server import (
    GRACE_SECONDS,
    ConnectClient,
    ServerCommand,
    ServerProcess,
    start_on_free_port,
    wait_until_ready,
)
from miles.cluster.ray.placement_group import (
    BundleRange,
    ClusterReservation,
    create_actor,
    first_error_line,
    read_device_ids,
)
from miles.core.errors import EngineError

# Seconds an actor may take for a call, beside what its server takes.
_CALL_SECONDS = 10.0


class RayServerActor:
    """Has the process of one server on the actor's node."""

    def __init__(self, name: str, log_path: Path) -> None:
        self._process = ServerProcess(name, log_path)

    def start(self, command: ServerCommand) -> tuple[str, int]:
        """Start the server on an address that other nodes reach; returns host and port."""
        host = ray.util.get_node_ip_address()
        if not command.argv[0]:  # the interpreter of this node
            command = replace(command, argv=(sys.executable, *command.argv[1:]))
        return host, self._process.start(command, host)

    def wait(self) -> str:
        """How it ended, when it has."""
        return self._process.wait()

    def read_tail(self) -> str:
        return self._process.read_tail()

    def end(self) -> None:
        self._process.end()


class RayServer:
    """Implements ``ServerHost``: engine ``number`` of those that were placed."""

    starts_here = True

    def __init__(
        self,
        name: str,
        number: int,
        command: ServerCommand,
        log_path: Path,
        connect: ConnectClient,
        reservation: ClusterReservation,
        seconds: float,
    ) -> None:
        self.name = name
        argv = ("", *command.argv[1:]) if command.argv[0] == sys.executable else command.argv
        self._number = number
        self._command = replace(command, argv=argv)
        self._log_path = log_path.resolve()
        self._connect = connect
        self._reservation = reservation
        self.start_timeout = seconds
        self._actor: ActorHandle[Any] | None = None
        self._ended: Future[str] | None = None
        self._client: SglangClient | None = None
        self._host = ""

    async def open(self) -> SglangClient:
        """Start it on a node with free devices, and wait until it answers; an error has the end of its log."""
        deadline = time.monotonic() + self.start_timeout
        return await start_on_free_port(lambda: self._open_once(deadline))

    async def _open_once(self, deadline: float) -> SglangClient:
        await self.close()
        try:
            bundles = await asyncio.to_thread(self._reservation.engine_bundles, self._number)
            environment = {**self._command.environment, **await self._visible_devices(bundles)}
            command = replace(self._command, environment=environment)
            kind = self._reservation.request.kind
            self._actor = create_actor(bundles, kind, RayServerActor, self.name, self._log_path, threads=4)
            self._host, port = await self._call("start", command, seconds=deadline - time.monotonic())
        except (RayError, TimeoutError) as error:
            await self.close()
            raise ServerLost(f"{self.name} could not be started on the cluster: {first_error_line(error)}") from error
        assert self._actor is not None
        self._ended = self._actor.wait.remote().future()
        self._client = client = self._connect(f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}")
        await wait_until_ready(self, client, deadline)
        return client

    def exit_reason(self) -> str | None:
        """How its process ended, or that its actor did."""
        if self._ended is None or not self._ended.done():
            return None
        error = self._ended.exception()
        if error is None:
            return f"{self._ended.result()} on {self._host}"
        return f"{self.name} was lost with its actor on {self._host}: {first_error_line(error)}"

    async def close(self) -> None:
        """End it: SIGTERM first, if its actor still answers."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        actor, ended = self._actor, self._ended
        if actor is not None:
            if ended is not None and not ended.done():
                with suppress(RayError, TimeoutError):
                    await self._call("end", seconds=GRACE_SECONDS + _CALL_SECONDS)
            self._actor = self._ended = None
            ray.kill(actor)

    async def _call(self, method: str, *args: Any, seconds: float) -> Any:
        """What a method of the actor returns."""
        assert self._actor is not None
        answer = getattr(self._actor, method).remote(*args).future()
        return await asyncio.wait_for(asyncio.wrap_future(answer), seconds)

    async def describe_log(self) -> str:
        try:
            return (
                f"the end of {self._log_path} on {self._host}:\n{await self._call('read_tail', seconds=_CALL_SECONDS)}"
            )
        except (RayError, TimeoutError) as error:
            return f"its log on {self._host} cannot be read: {first_error_line(error)}"

    async def _visible_devices(self, bundles: BundleRange) -> dict[str, str]:
        if self._reservation.request.kind == "CPU":
            return {}
        found = await asyncio.to_thread(read_device_ids, bundles)
        if len(found) != bundles.count:
            raise EngineError(f"{self.name} needs {bundles.count} devices, but Ray gave it {', '.join(found)}")
        # ROCm reads both, and Ray has set the second for the actor alone.
        return dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"), ",".join(found))
