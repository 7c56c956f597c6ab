"""Any Model Context Protocol server as tools: a process is started, asked what it offers, and called over stdio.

A server is shared by all attempts, or each attempt has one of its own that starts in the attempt's folder. A shared one
that ends is started again, a few times in a row; an attempt's own has taken its state along, and the attempt fails.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles import __version__
from miles.core.errors import UsageError
from miles.rollout.tools.rpc import Gone, Process, RpcError, started
from miles.rollout.tools.tool import EnvironmentFailed, Tool, ToolError

VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""Of the protocol, newest first; what is used of it is the same in all."""

_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
_MOST_PAGES = 100


def _nothing() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """How to start one. ``prefix`` goes before the names of its tools; of ``tools``, when given, there are no others.

    ``seconds`` is the longest it may take to start and to answer a call; the limits of an attempt's tools hold as well.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=_nothing)
    cwd: str | None = None
    shared: bool = False
    prefix: str = ""
    tools: tuple[str, ...] | None = None
    seconds: float = 60.0
    restarts: int = 3


def read_servers(path: str | Path) -> dict[str, Server]:
    """From the JSON other programs use too: ``{"mcpServers": {"name": {"command": "...", "args": [...]}}}``."""
    try:
        servers = json.loads(Path(path).read_text(encoding="utf-8"))["mcpServers"]
        return {name: _server(name, dict(entry)) for name, entry in servers.items()}
    except OSError as error:
        raise UsageError(f"The MCP servers in {path} cannot be read ({error.strerror}); name a JSON file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f'{path} does not list MCP servers as {{"mcpServers": {{"name": {{"command": "..."}}}}}} ({error}).'
        ) from error


def _server(name: str, entry: dict[str, Any]) -> Server:
    if "command" not in entry:
        raise ValueError(f"{name} has no command, and only servers over stdio are started")
    entry.pop("type", None)
    for key in ("args", "tools"):
        if entry.get(key) is not None:
            entry[key] = tuple(map(str, entry[key]))
    return Server(name=name, **entry)


class Connection:
    """A server that is running and has said what it offers. Starts anew in another event loop."""

    def __init__(self, server: Server, *, environ: Mapping[str, str], cwd: Path | None = None) -> None:
        self._server = server
        self._env = {name: environ[name] for name in _INHERITED if name in environ} | dict(server.env)
        self._cwd = Path(server.cwd) if server.cwd is not None else cwd
        self._process: Process | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._lost = 0

    async def tools(self) -> list[Tool]:
        """What it offers."""
        process = await self._running()
        found: list[Tool] = []
        params: dict[str, Any] = {}
        for _ in range(_MOST_PAGES):
            page = await self._answer(process, "tools/list", params)
            found += [self._tool(entry) for entry in page["tools"] if self._wanted(entry["name"])]
            if not page.get("nextCursor"):
                return found
            params = {"cursor": page["nextCursor"]}
        raise EnvironmentFailed(f"the MCP server {self._server.name} lists its tools without end")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """What the tool says; ToolError when it says it failed."""
        process = await self._running()
        asked = {"name": name, "arguments": dict(arguments)}
        try:
            result = await process.ask("tools/call", asked, seconds=self._server.seconds)
        except RpcError as error:
            raise ToolError(str(error)) from error
        except Gone as error:
            if not self._server.shared:
                raise EnvironmentFailed(f"the MCP server {self._server.name} is gone: {error}") from error
            raise ToolError(f"{name} failed, because its server ended ({error})") from error
        self._lost = 0
        text = _text(result)
        if result.get("isError"):
            raise ToolError(text)
        return text

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None and asyncio.get_running_loop() is self._loop:
            await process.close()

    def _wanted(self, name: str) -> bool:
        return self._server.tools is None or name in self._server.tools

    def _tool(self, entry: Mapping[str, Any]) -> Tool:
        name = str(entry["name"])

        async def call(arguments: Mapping[str, Any]) -> str:
            return await self.call(name, arguments)

        about = str(entry.get("description") or entry.get("title") or name)
        return Tool(name=self._server.prefix + name, description=about, parameters=entry["inputSchema"], call=call)

    async def _running(self) -> Process:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what ran in another loop went with it
            self._loop, self._process, self._starting = loop, None, asyncio.Lock()
        async with self._starting:
            if self._process is not None and self._process.alive:
                return self._process
            if self._process is not None:
                await self._process.close()
                self._lost += 1
                if not self._server.shared or self._lost > self._server.restarts:
                    times = f" {self._lost} times in a row" if self._lost > 1 else ""
                    raise EnvironmentFailed(f"the MCP server {self._server.name} ended{times}")
            self._process = await self._opened()
            return self._process

    async def _opened(self) -> Process:
        server = self._server
        try:
            process = await started((server.command, *server.args), env=self._env, cwd=self._cwd)
        except Gone as error:
            raise EnvironmentFailed(f"the MCP server {server.name} did not start: {error}") from error
        try:
            about = {"name": "miles", "version": __version__}
            asked = {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": about}
            said = await self._answer(process, "initialize", asked)
            if said.get("protocolVersion") not in VERSIONS:
                raise EnvironmentFailed(
                    f"the MCP server {server.name} speaks version {said.get('protocolVersion')} of the protocol, and "
                    f"not {', '.join(VERSIONS)}"
                )
            await process.tell("notifications/initialized")
        except BaseException:
            await process.close()
            raise
        return process

    async def _answer(self, process: Process, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """An answer without which there are no tools."""
        try:
            return await process.ask(method, params, seconds=self._server.seconds)
        except (RpcError, Gone, TimeoutError) as error:
            said = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise EnvironmentFailed(f"the MCP server {self._server.name} did not do {method}: {said}") from error


class Servers:
    """The servers of a run, by name; of ``environ`` they see a few harmless names. ``close`` ends the shared ones."""

    def __init__(self, servers: Mapping[str, Server], *, environ: Mapping[str, str]) -> None:
        self._servers = servers
        self._environ = environ
        shared = [server for server in servers.values() if server.shared]
        self._shared = {server.name: Connection(server, environ=environ) for server in shared}

    def __contains__(self, name: str) -> bool:
        return name in self._servers

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._servers)

    async def open(self, name: str, stack: AsyncExitStack, cwd: Path) -> list[Tool]:
        """Its tools, for one attempt; a server of its own works in ``cwd`` and ends with the stack."""
        if name in self._shared:
            return await self._shared[name].tools()
        connection = Connection(self._servers[name], environ=self._environ, cwd=cwd)
        stack.push_async_callback(connection.close)
        return await connection.tools()

    async def close(self) -> None:
        for connection in self._shared.values():
            await connection.close()


def _text(result: Mapping[str, Any]) -> str:
    """The words of a result; media and resources are named, since this model reads text."""
    said: list[str] = []
    for part in result.get("content") or ():
        kind = part.get("type")
        resource = part.get("resource") or {}
        if kind == "text":
            said.append(part["text"])
        elif kind == "resource" and "text" in resource:
            said.append(resource["text"])
        elif kind == "resource_link":
            said.append(f"[{part.get('name', 'resource')}: {part.get('uri')}]")
        else:
            said.append(f"[{kind}: {part.get('mimeType') or resource.get('mimeType') or 'not text'}]")
    if not said and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(said)
