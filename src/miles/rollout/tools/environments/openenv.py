"""Environments served as OpenEnv serves them: reset and step over a WebSocket, where every connection has its own game.

::

    ws    {"type": "reset", "data": {...}}   {"type": "step", "data": action}   {"type": "close"}
    http  POST /reset {...}                  POST /step {"action": action}      (whatever game the server has)
    both  answer {"observation": {...}, "reward": 1.0, "done": false}, the first within {"type": ..., "data": ...}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles.core.errors import UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.environments.textgame import action_of, seed_of
from miles.rollout.tools.tool import EnvironmentFailed, Message

_LONGEST = 16 << 20  # bytes of an answer
_LONGEST_PAUSE = 1.0  # seconds between two questions whether there is a place now
_FULL, _NOT_AN_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
_FIELDS = ("missing", "extra_forbidden")  # what pydantic calls a field that is not there, and one that should not be


class _Refused(Exception):
    """The server answered that it will not; ``code`` is its word for why.

    ``misfits``: what was sent has not the fields it takes, whatever their values.
    """

    def __init__(self, code: str, why: str, *, misfits: bool = False) -> None:
        super().__init__(why)
        self.code = code
        self.misfits = misfits


class OpenEnvEnvironment:
    """``url`` of a server: ``http://host``, or of its WebSocket, ``ws://host/ws``.

    An action is an object with the reply's text under ``action`` (or all of it, where it is a JSON object and
    ``action`` is empty); what is observed is the text under ``observation``, or the whole object as JSON. A full server
    is asked again for ``patience`` seconds. ``posts`` asks by POST instead: OpenEnv answers each of those from a fresh
    environment, so that is for servers which keep a game between them, and then for one attempt at a time.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        reset: Mapping[str, Any] = EMPTY,
        seconds: float = 60.0,
        patience: float = 600.0,
        posts: bool = False,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(f"The environment openenv needs an http or ws address as url, and {url!r} is none.")
        self._url = url.rstrip("/") if posts else _socket_of(url)
        self._action = action
        self._observation = observation
        self._reset = reset
        self._seconds = seconds
        self._patience = patience
        self._posts = posts
        self._http: Any = None
        self._line: _Line | None = None

    async def open(self, prompt: Prompt) -> Opening:
        aiohttp = package("aiohttp", environment="openenv", install="miles-rl[environments]")
        self._errors = (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._seconds))
        given = prompt.metadata.get("reset", {})
        wanted = {"seed": seed_of(prompt), **self._reset, **(given if isinstance(given, Mapping) else {})}
        try:
            first = await self._begun(wanted)
        except _Refused as error:
            raise EnvironmentFailed(f"{self._url} refused reset: {error}") from error
        return Opening(messages=(*prompt.messages, self._seen(first)), scores=True)

    async def step(self, reply: Message) -> Step:
        """A reply that is no action of this environment's is told so, and the game goes on."""
        try:
            said = await self._asked("step", self._act(action_of(reply)))
        except _Refused as error:
            if error.misfits and self._action:
                mend = "write the field's name as action, or nothing there for replies that are JSON objects"
                raise UsageError(
                    f"{self._url} takes no action of a field {self._action!r} ({error}); {mend}."
                ) from error
            if error.code == _NOT_AN_ACTION:
                return Step(messages=[{"role": "user", "content": f"Error: {error}"}])
            raise EnvironmentFailed(f"{self._url} refused step: {error}") from error
        reward = said.get("reward")
        done = bool(said.get("done"))
        messages = () if done else (self._seen(said),)
        return Step(messages=messages, reward=None if reward is None else float(reward), done=done)

    async def close(self) -> None:
        if self._line is not None:
            await self._line.close()
        if self._http is not None:
            await self._http.close()

    def _act(self, text: str) -> Mapping[str, Any]:
        if self._action:
            return {self._action: text}
        try:
            action = json.loads(text)
        except ValueError:
            action = None
        return action if isinstance(action, dict) else {"message": text}

    async def _begun(self, wanted: Mapping[str, Any]) -> Mapping[str, Any]:
        """The first observation of a game, once the server has a place for it."""
        if self._posts:
            return await self._asked("reset", wanted)
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, 0.01
        while True:
            try:
                self._line = _Line(await self._http.ws_connect(self._url, max_msg_size=_LONGEST))
            except self._errors as error:
                raise self._failed("could not be reached", error) from error
            try:
                return await self._asked("reset", wanted)
            except _Refused as error:
                if error.code != _FULL or loop.time() + pause > until:
                    raise
            await self._line.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _asked(self, verb: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            if self._line is None:
                return await self._over_http(verb, data)
            async with asyncio.timeout(self._seconds):
                said = await self._line.ask({"type": verb, "data": dict(data)})
            if said is None:
                raise EnvironmentFailed(f"{self._url} hung up at {verb} (code {self._line.close_code})")
            answer = json.loads(said)
            if answer["type"] == "error":
                raise _refusal(answer["data"])
            return answer["data"]
        except self._errors as error:
            raise self._failed(f"did not do {verb}", error) from error

    async def _over_http(self, verb: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        body = dict(data) if verb == "reset" else {"action": dict(data)}
        async with self._http.post(f"{self._url}/{verb}", json=body) as response:
            text = await response.text()
            if response.status == 422:
                raise _refusal(
                    {"code": _NOT_AN_ACTION, "message": "Invalid message", "errors": json.loads(text)["detail"]}
                )
            if response.status != 200:
                raise _Refused("", f"status {response.status} ({text[:200]})")
            return json.loads(text)

    def _seen(self, said: Mapping[str, Any]) -> dict[str, Any]:
        seen = said["observation"]
        if self._observation:
            seen = seen[self._observation]
        elif isinstance(seen, Mapping):  # its metadata are for whoever runs the game, not for who plays it
            seen = {key: value for key, value in seen.items() if key != "metadata"}
        return {"role": "user", "content": seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)}

    def _failed(self, what: str, error: BaseException) -> EnvironmentFailed:
        said = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return EnvironmentFailed(f"{self._url} {what} ({said})")


class _Line:
    """A WebSocket that is read all the time: pings are answered by whoever reads, and the policy may take minutes."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._answers: asyncio.Queue[str | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @property
    def close_code(self) -> int | None:
        return self._socket.close_code

    async def ask(self, question: Mapping[str, Any]) -> str | None:
        """What the server says to it; None when it hung up."""
        # One that is full says so and hangs up, perhaps before it was asked: that is still to be read.
        with suppress(ConnectionError):
            await self._socket.send_json(question)
        return await self._answers.get()

    async def close(self) -> None:
        with suppress(ConnectionError):
            if not self._socket.closed:
                await self._socket.send_json({"type": "close"})
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            if isinstance(message.data, str):
                self._answers.put_nowait(message.data)
        self._answers.put_nowait(None)


def _socket_of(url: str) -> str:
    """Where a server's games are: OpenEnv has them at /ws."""
    bare = url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")
    return bare if bare.endswith("/ws") else f"{bare}/ws"


def _refusal(data: Mapping[str, Any]) -> _Refused:
    """What a server says about why it will not, with what is wrong in an action."""
    errors = data.get("errors", ())
    wrong = [": ".join([*map(str, each["loc"]), each["msg"]]) for each in errors]
    misfits = any(each["type"] in _FIELDS for each in errors)
    return _Refused(str(data.get("code")), "; ".join([str(data.get("message")), *wrong]), misfits=misfits)
