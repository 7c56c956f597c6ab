"""Model Context Protocol (MCP) servers as tools, over stdio, through the official ``mcp`` SDK.

A server is shared by all trajectories, or each trajectory has its own, which runs in the trajectory's workspace. A
shared server that exits is restarted, a limited number of times in a row; when a trajectory's own server exits, its
state is lost and the trajectory fails. The SDK is imported when a server starts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from miles import __version__
from miles.core.errors import UsageError
from miles.core.image_files import ImageFileError, decode_base64_image
from miles.core.media_store import MediaStore
from miles.rollout.tools.tool import EnvironmentFailed, Tool, ToolError

if TYPE_CHECKING:
    from mcp import ClientSession, types

T = TypeVar("T")
_INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "LANG", "LC_ALL", "TMPDIR", "SSL_CERT_FILE")
_MAX_PAGES = 100
_GRACE_SECONDS = 5.0  # for the SDK to end a server process, which it kills after two
_CANCEL_SECONDS = 1.0


def _empty_env() -> Mapping[str, str]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServerConfig:
    """How to start a server. ``prefix`` is prepended to its tool names; ``tools``, if set, lists the tools to offer.

    ``seconds`` limits startup and each call; the limits of a trajectory's tools apply as well.
    """

    name: str
    command: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=_empty_env)
    cwd: str | None = None
    shared: bool = False
    prefix: str = ""
    tools: tuple[str, ...] | None = None
    seconds: float = 60.0
    restarts: int = 3


def read_mcp_config(path: str | Path) -> dict[str, MCPServerConfig]:
    """Read the usual MCP JSON file: ``{"mcpServers": {"name": {"command": "...", "args": [...]}}}``."""
    if find_spec("mcp") is None:
        raise UsageError("--mcp-servers needs the package mcp; install it with pip install 'miles-rl[mcp]'.")
    try:
        servers = json.loads(Path(path).read_text(encoding="utf-8"))["mcpServers"]
        return {name: _parse_server(name, dict(entry)) for name, entry in servers.items()}
    except OSError as error:
        raise UsageError(f"The MCP servers in {path} cannot be read ({error.strerror}); name a JSON file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f'{path} does not list MCP servers as {{"mcpServers": {{"name": {{"command": "..."}}}}}} ({error}).'
        ) from error


def _parse_server(name: str, entry: dict[str, Any]) -> MCPServerConfig:
    if "command" not in entry:
        raise ValueError(f"{name} has no command, and only stdio servers are supported")
    entry.pop("type", None)
    for key in ("args", "tools"):
        if entry.get(key) is not None:
            entry[key] = tuple(map(str, entry[key]))
    return MCPServerConfig(name=name, **entry)


class _ServerGone(Exception):
    """The server process exited; the message says why."""


class MCPConnection:
    """A running server and its client session. It is reopened in another event loop.

    Images of its results go to ``media``; without it they are named, since the policy reads text only.
    """

    def __init__(
        self,
        config: MCPServerConfig,
        *,
        environ: Mapping[str, str],
        cwd: Path | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self._config = config
        self._media = media
        self._env = {name: environ[name] for name in _INHERITED if name in environ} | dict(config.env)
        self._cwd = Path(config.cwd) if config.cwd is not None else cwd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._starting = asyncio.Lock()
        self._session: ClientSession | None = None
        self._process: asyncio.Task[None] | None = None
        self._stderr: TextIO | None = None
        self._exits = 0

    async def tools(self) -> list[Tool]:
        """List the server's tools, over all pages."""
        session = await self._connect()
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_MAX_PAGES):
            page = await self._request_required("tools/list", session.list_tools(cursor))
            offered = self._config.tools
            found += [self._build_tool(tool) for tool in page.tools if offered is None or tool.name in offered]
            if not page.nextCursor:
                return found
            cursor = page.nextCursor
        raise EnvironmentFailed(f"the MCP server {self._config.name} lists its tools without end")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """Call a tool and return its text, or content parts if it has images; ToolError when the tool fails."""
        from mcp import McpError

        session, request_id = await self._connect(), 0

        async def send() -> types.CallToolResult:
            nonlocal request_id
            request_id = session._request_id  # pyright: ignore[reportPrivateUsage]  # the id of the next request
            return await session.call_tool(name, dict(arguments))

        try:
            result = await self._request(send())
        except McpError as error:
            raise ToolError(f"{error} (error {error.error.code})") from error
        except _ServerGone as error:
            if not self._config.shared:
                raise EnvironmentFailed(f"the MCP server {self._config.name} is gone: {error}") from error
            raise ToolError(f"{name} failed, because its server ended ({error})") from error
        except (TimeoutError, asyncio.CancelledError):
            await _send_cancelled(session, request_id)
            raise
        self._exits = 0
        if result.isError:
            raise ToolError(_join_text(_read_parts(result, None)))
        parts = await asyncio.to_thread(_read_parts, result, self._media)
        return parts if any(part["type"] == "image" for part in parts) else _join_text(parts)

    async def close(self) -> None:
        """Stop the server: the SDK closes its input, then terminates, then kills its process tree."""
        process = self._process
        self._process = None
        self._session = None
        if process is not None and asyncio.get_running_loop() is self._loop:
            process.cancel()
            await asyncio.gather(process, return_exceptions=True)

    def _build_tool(self, tool: types.Tool) -> Tool:
        async def call(arguments: Mapping[str, Any]) -> str | list[dict[str, Any]]:
            return await self.call(tool.name, arguments)

        description = tool.description or tool.title or tool.name
        name = self._config.prefix + tool.name
        return Tool(name=name, description=description, parameters=tool.inputSchema, call=call)

    async def _connect(self) -> ClientSession:
        """Return the session of the running server, and start or restart it first where needed."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a server of another event loop ended with that loop
            self._loop = loop
            self._process = None
            self._starting = asyncio.Lock()
        async with self._starting:
            if self._process is not None and not self._process.done() and self._session is not None:
                return self._session
            if self._process is not None:
                await self.close()
                self._exits += 1
                if not self._config.shared or self._exits > self._config.restarts:
                    times = f" {self._exits} times in a row" if self._exits > 1 else ""
                    raise EnvironmentFailed(f"the MCP server {self._config.name} ended{times}")
            return await self._start()

    async def _start(self) -> ClientSession:
        ready: asyncio.Future[ClientSession] = asyncio.get_running_loop().create_future()
        self._process = asyncio.create_task(self._run_server(ready))
        try:
            session = await ready
        except OSError as error:
            self._process = None
            reason = f"{self._config.command} cannot be started ({error.strerror})"
            raise EnvironmentFailed(f"the MCP server {self._config.name} did not start: {reason}") from error
        try:
            await self._request_required("initialize", session.initialize())
        except BaseException:
            await self.close()
            raise
        self._session = session
        return session

    async def _run_server(self, ready: asyncio.Future[ClientSession]) -> None:
        """Own the process and the session: the SDK's contexts must be entered and exited by one task.

        Messages pass through this task, so that it ends when the server closes its output.
        """
        import anyio
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import Implementation

        logging.getLogger("mcp").setLevel(logging.CRITICAL)  # a server that prints to stdout is not our error
        params = StdioServerParameters(
            command=self._config.command, args=list(self._config.args), env=self._env, cwd=self._cwd
        )
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  # read after the server ended
        to_session, from_server = anyio.create_memory_object_stream[Any](0)
        try:
            async with (
                stdio_client(params, self._stderr) as (output, server_input),
                ClientSession(
                    from_server, server_input, client_info=Implementation(name="miles", version=__version__)
                ) as session,
                to_session,
            ):
                ready.set_result(session)
                async for message in output:
                    await to_session.send(message)
        except Exception as error:  # a server that died mid-write; its callers see a closed connection
            if not ready.done():
                ready.set_exception(error)

    async def _request(self, answer: Coroutine[Any, Any, T]) -> T:
        """Await an answer within the time limit; _ServerGone when the server exits first."""
        from anyio import BrokenResourceError, ClosedResourceError

        assert self._process is not None
        process, request = self._process, asyncio.create_task(answer)
        try:
            async with asyncio.timeout(self._config.seconds):
                await asyncio.wait({request, process}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done():
                raise _ServerGone(await self._exit_reason(process))
            return request.result()
        except (ClosedResourceError, BrokenResourceError) as error:
            raise _ServerGone(await self._exit_reason(process)) from error
        finally:
            request.cancel()

    async def _request_required(self, method: str, answer: Coroutine[Any, Any, T]) -> T:
        """Await an answer without which there are no tools; EnvironmentFailed where it does not come."""
        try:
            return await self._request(answer)
        except Exception as error:
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            raise EnvironmentFailed(f"the MCP server {self._config.name} did not do {method}: {reason}") from error

    async def _exit_reason(self, process: asyncio.Task[None]) -> str:
        """The last line the server wrote to stderr, once its process is gone."""
        await asyncio.wait({process}, timeout=_GRACE_SECONDS)
        assert self._stderr is not None
        self._stderr.seek(0)
        lines = self._stderr.read().strip().splitlines()
        return f"it ended: {lines[-1][:200]}" if lines else "it ended"


class MCPServers:
    """The servers of a run by name. They inherit a few harmless environment variables. ``close`` stops shared ones.

    ``media`` has the images of a model that reads images.
    """

    def __init__(
        self, servers: Mapping[str, MCPServerConfig], *, environ: Mapping[str, str], media: MediaStore | None = None
    ) -> None:
        self._servers = servers
        self._environ = environ
        self._media = media
        shared = [server for server in servers.values() if server.shared]
        self._shared = {server.name: MCPConnection(server, environ=environ, media=media) for server in shared}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self._servers)

    async def open(self, name: str, stack: AsyncExitStack, cwd: Path) -> list[Tool]:
        """The tools of a server for one trajectory; a server of its own runs in ``cwd`` and ends with the stack."""
        if name in self._shared:
            return await self._shared[name].tools()
        connection = MCPConnection(self._servers[name], environ=self._environ, cwd=cwd, media=self._media)
        stack.push_async_callback(connection.close)
        return await connection.tools()

    async def close(self) -> None:
        for connection in self._shared.values():
            await connection.close()


async def _send_cancelled(session: ClientSession, request_id: int) -> None:
    """Tell the server that nobody waits for a request any more; the SDK does not do that by itself."""
    from mcp import types

    params = types.CancelledNotificationParams(requestId=request_id, reason="the caller stopped waiting")
    with suppress(Exception):  # the server may be gone, and the call has failed already
        async with asyncio.timeout(_CANCEL_SECONDS):
            await session.send_notification(types.ClientNotification(types.CancelledNotification(params=params)))


def _read_parts(result: types.CallToolResult, media: MediaStore | None) -> list[dict[str, Any]]:
    """The content parts of a result. Images are put into ``media``; other media and binary resources are named."""
    from mcp import types

    parts: list[dict[str, Any]] = []
    for part in result.content:
        if isinstance(part, types.TextContent):
            parts.append(_text_part(part.text))
        elif isinstance(part, types.EmbeddedResource):
            resource = part.resource
            is_text = isinstance(resource, types.TextResourceContents)
            parts.append(_text_part(resource.text if is_text else f"[resource: {resource.mimeType or 'not text'}]"))
        elif isinstance(part, types.ResourceLink):
            parts.append(_text_part(f"[{part.name}: {part.uri}]"))
        elif isinstance(part, types.ImageContent) and media is not None:
            parts.append(_read_image(part, media))
        else:
            parts.append(_text_part(f"[{part.type}: {part.mimeType}]"))
    if not parts and result.structuredContent is not None:
        parts.append(_text_part(json.dumps(result.structuredContent, ensure_ascii=False)))
    return parts


def _read_image(part: types.ImageContent, media: MediaStore) -> dict[str, Any]:
    try:
        reference = media.put(decode_base64_image(part.data, media.limits), origin="an image of an MCP server")
    except ImageFileError as error:
        return _text_part(f"[{part.type}: {part.mimeType}, which {error}]")
    return {"type": "image", "image": reference}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _join_text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(part["text"]) for part in parts)
