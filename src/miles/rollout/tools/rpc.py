"""JSON-RPC 2.0 with a process over its standard input and output, a message a line, as MCP's stdio transport is.

::

    ask ----line----> process          many questions may be under way; answers come in any order
    ask <---line----- process          what it asks us is refused, or answered where it is a ping
    (stderr)          the last lines are kept, for the sentence that says why it ended
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_LONGEST_LINE = 32 << 20  # bytes
_GRACE_SECONDS = 2.0
_NO_METHOD = -32601


class RpcError(Exception):
    """The process answered with an error."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"{message} (error {code})")


class Gone(Exception):
    """The process has ended, or does not speak the protocol; says how."""


class Process:
    """A running process and the questions it has not answered yet. Made by ``started``."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self._process = process
        self._in, self._out, self._err = process.stdin, process.stdout, process.stderr
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._complaints: deque[str] = deque(maxlen=5)
        self._why: str | None = None
        self._reading = asyncio.create_task(self._read())
        self._hearing = asyncio.create_task(self._hear())

    @property
    def alive(self) -> bool:
        return self._why is None and self._process.returncode is None

    async def ask(self, method: str, params: Mapping[str, Any], *, seconds: float) -> Any:
        """The result; RpcError when refused, Gone when it ends first, TimeoutError when it takes too long.

        A question nobody waits for any more is called off.
        """
        if self._why is not None:
            raise Gone(self._why)
        self._number += 1
        number = self._number
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            await self._send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
            async with asyncio.timeout(seconds):
                return await answer
        except (TimeoutError, asyncio.CancelledError):
            if method != "initialize":  # which must not be called off
                told = {"requestId": number, "reason": "no longer waited for"}
                with contextlib.suppress(Gone):
                    self._write({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": told})
            raise
        finally:
            del self._waiting[number]

    async def tell(self, method: str) -> None:
        await self._send({"jsonrpc": "2.0", "method": method})

    async def close(self) -> None:
        """End it: by closing its input, then by asking, then by force."""
        self._in.close()
        for blow in (None, self._process.terminate, self._process.kill):
            if blow is not None:
                with contextlib.suppress(ProcessLookupError):
                    blow()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE_SECONDS):
                    await self._process.wait()
                    break
        for task in (self._reading, self._hearing):
            task.cancel()
        await asyncio.gather(self._reading, self._hearing, return_exceptions=True)
        self._end("it was closed")

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._in.is_closing():
            raise Gone("its input is closed")
        self._in.write(json.dumps(message, ensure_ascii=False).encode() + b"\n")

    async def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._write(message)
            await self._in.drain()
        except (Gone, ConnectionError) as error:
            await asyncio.wait({self._reading}, timeout=_GRACE_SECONDS)  # which finds out how it ended
            raise Gone(self._why or "it does not read what it is sent") from error

    async def _read(self) -> None:
        why = ""
        try:
            while line := await self._out.readline():
                self._take(line)
        except ValueError:
            why = "it wrote a line that is too long"
        status: int | None = None
        with contextlib.suppress(TimeoutError):  # it may have closed its output and live on
            status = await asyncio.wait_for(self._process.wait(), _GRACE_SECONDS) if not why else None
        await asyncio.wait({self._hearing}, timeout=_GRACE_SECONDS)
        said = f": {self._complaints[-1]}" if self._complaints else ""
        closed = "it closed its output and lives on" if status is None else f"it ended with status {status}"
        self._end((why or closed) + said)

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            self._complaints.append(line.decode(errors="replace").strip()[:200])  # a print that strayed
            return
        for each in message if isinstance(message, list) else [message]:
            if not isinstance(each, dict):
                continue
            if "method" in each:
                self._asked(each)
            elif isinstance(each.get("id"), int) and each["id"] in self._waiting:
                self._answered(self._waiting[each["id"]], each)

    def _asked(self, message: Mapping[str, Any]) -> None:
        if "id" not in message:
            return  # a notification
        answer: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] == "ping":
            answer["result"] = {}
        else:
            answer["error"] = {"code": _NO_METHOD, "message": f"there is no {message['method']} here"}
        with contextlib.suppress(Gone):
            self._write(answer)

    def _answered(self, waiting: asyncio.Future[Any], message: Mapping[str, Any]) -> None:
        if waiting.done():
            return
        error = message.get("error")
        if isinstance(error, dict):
            waiting.set_exception(RpcError(int(error.get("code", 0)), str(error.get("message", "it failed"))))
        else:
            waiting.set_result(message.get("result"))

    async def _hear(self) -> None:
        with contextlib.suppress(ValueError):
            while line := await self._err.readline():
                self._complaints.append(line.decode(errors="replace").strip()[:200])

    def _end(self, why: str) -> None:
        if self._why is None:
            self._why = why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Gone(self._why))


async def started(argv: Sequence[str], *, env: Mapping[str, str], cwd: Path | None) -> Process:
    """Start a process; Gone when there is no such program."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=dict(env),
            cwd=cwd,
            limit=_LONGEST_LINE,
            start_new_session=True,
        )
    except OSError as error:
        raise Gone(f"{argv[0]} cannot be started ({error.strerror})") from error
    return Process(process)
