"""Servers of remote engines: local subprocesses with a log each, and external servers that run elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import re
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles.backends.remote.client import ServerLost, SglangClient
from miles.cluster.oom_kill import OomKillMonitor
from miles.cluster.process import ChildProcess, find_free_port, read_log_tail
from miles.core.errors import EngineError

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 5.0
_PORT_ATTEMPTS = 5

ConnectClient = Callable[[str], SglangClient]
"""Makes the client of the server at a URL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started: its command line without its address, and its environment.

    ``settings`` are written to a file with owner-only permissions, which ``settings_flag`` names: secrets that the
    server does not read from its environment.
    """

    argv: tuple[str, ...]
    host_flag: str = "--host"
    port_flag: str = "--port"
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, str] = field(default_factory=dict)
    settings_flag: str = "--config"


class ServerProcess:
    """The process of one server, from ``start`` to ``end``, any number of times; it ends with this process."""

    def __init__(self, name: str, log_path: Path) -> None:
        self.name = name
        self.log_path = log_path
        self._process: ChildProcess | None = None
        self._oom_kills = OomKillMonitor()
        self._settings: Path | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Of the guard process, the parent of the server's own."""
        return None if self._process is None else self._process.pid

    def start(self, command: ServerCommand, host: str) -> int:
        """Start it on a free port; returns the port."""
        port = find_free_port(host)
        argv = [*command.argv, command.host_flag, host, command.port_flag, str(port)]
        if command.settings:
            argv += [command.settings_flag, str(self._write_settings(command.settings))]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as out:
            out.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(argv)}\n".encode())
            out.flush()
            self._log_start = out.tell()
            try:
                env = {**os.environ, **command.environment}
                self._oom_kills = OomKillMonitor()
                self._process = ChildProcess(argv, env=env, stdout=out, stderr=out, guarded=True)
            except OSError as error:
                raise EngineError(f"{self.name} cannot be started: {error}") from error
        return port

    def _write_settings(self, settings: Mapping[str, str]) -> Path:
        descriptor, name = tempfile.mkstemp(prefix="miles-server-", suffix=".yaml")
        self._settings = Path(name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())
        return self._settings

    def exit_reason(self) -> str | None:
        """How it ended; None while it runs."""
        code = None if self._process is None else self._process.poll()
        if code is None:
            self._oom_kills.note_alive()
            return None
        return f"{self.name} ended with {self._oom_kills.describe_exit(code)}"

    def wait(self) -> str:
        """How it ended, when it has."""
        assert self._process is not None
        return f"{self.name} ended with {self._oom_kills.describe_exit(self._process.wait())}"

    def read_tail(self) -> str:
        """The last lines of its log since it was started."""
        return read_log_tail(self.log_path, self._log_start)

    def end(self) -> None:
        """End it: SIGTERM first, then SIGKILL."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate(GRACE_SECONDS)
        if self._settings is not None:
            self._settings.unlink(missing_ok=True)
            self._settings = None


class ServerHost(Protocol):
    """A server. ``open`` returns when it answers; ``exit_reason`` is not None when it is known to have ended.

    ``starts_here``: ``open`` starts it, so that one that has died can be brought back.
    """

    @property
    def starts_here(self) -> bool: ...

    async def open(self) -> SglangClient: ...
    def exit_reason(self) -> str | None: ...
    async def close(self) -> None: ...


class LocalServer:
    """A server that this run starts on this machine; it ends with the run, however that ends."""

    starts_here = True

    def __init__(
        self, name: str, command: ServerCommand, log_path: Path, connect: ConnectClient, *, seconds: float
    ) -> None:
        self.name = name
        self._command = command
        self._connect = connect
        self.start_timeout = seconds
        self._process = ServerProcess(name, log_path)
        self._client: SglangClient | None = None

    @property
    def pid(self) -> int | None:
        """Of the guard process, the parent of the server's own."""
        return self._process.pid

    async def open(self) -> SglangClient:
        """Start it, and wait until it answers; the error of one that does not has the end of its log."""
        deadline = time.monotonic() + self.start_timeout
        return await start_on_free_port(lambda: self._open_once(deadline))

    async def _open_once(self, deadline: float) -> SglangClient:
        await self.close()
        port = self._process.start(self._command, LOOPBACK)
        self._client = client = self._connect(f"http://{LOOPBACK}:{port}")
        await wait_until_ready(self, client, deadline)
        return client

    def exit_reason(self) -> str | None:
        return self._process.exit_reason()

    async def describe_log(self) -> str:
        return f"the end of {self._process.log_path}:\n{self._process.read_tail()}"

    async def close(self) -> None:
        """End it: SIGTERM first, then SIGKILL."""
        if self._client is not None:
            await self._client.close()
            self._client = None
        await asyncio.to_thread(self._process.end)


class ExternalServer:
    """A server that runs already, at ``url``; it is neither started nor ended here."""

    starts_here = False

    def __init__(self, name: str, url: str, connect: ConnectClient, *, seconds: float) -> None:
        self.name = name
        self._url = url
        self._connect = connect
        self._seconds = seconds
        self._client: SglangClient | None = None

    async def open(self) -> SglangClient:
        """Wait until it answers."""
        await self.close()
        self._client = client = self._connect(self._url)
        deadline = time.monotonic() + self._seconds
        while (why := await client.check_health(5.0, generate=False)) is not None:
            if time.monotonic() > deadline:
                raise ServerLost(f"{self.name} at {self._url} does not answer: {why}")
            await asyncio.sleep(0.5)
        await client.fetch_info()
        return client

    def exit_reason(self) -> str | None:
        return None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
            self._client = None


class StartedServer(ServerHost, Protocol):
    """A server that this run starts, within ``start_timeout`` seconds."""

    name: str
    start_timeout: float

    async def describe_log(self) -> str: ...


class PortTaken(ServerLost):
    """A server that ended while it started, because another process had bound its port."""


async def start_on_free_port(start: Callable[[], Awaitable[SglangClient]]) -> SglangClient:
    """Start a server, again on another port if its port is taken between the choice and the bind."""
    for _ in range(_PORT_ATTEMPTS - 1):
        with suppress(PortTaken):
            return await start()
    return await start()


def is_port_conflict(log: str) -> bool:
    """Whether a server's log says that its port was taken: the words of the kernel's error, or its number."""
    return re.search(r"address already in use|\[Errno 98\]|EADDRINUSE", log, re.IGNORECASE) is not None


async def wait_until_ready(server: StartedServer, client: SglangClient, deadline: float) -> None:
    """Poll the health of a server that was started; raises ``ServerLost`` with its log when it ends or is too late."""
    while True:
        if (why := server.exit_reason()) is not None:
            log = await server.describe_log()
            raise (PortTaken if is_port_conflict(log) else ServerLost)(f"{why} while it started; {log}")
        if await client.check_health(5.0, generate=False) is None:
            await client.fetch_info()
            return
        if time.monotonic() > deadline:
            late = f"{server.name} was not ready within {server.start_timeout:g} s (--rollout-start-timeout)"
            log = await server.describe_log()
            await server.close()
            raise ServerLost(f"{late}; {log}")
        await asyncio.sleep(0.1)
