"""OpenEnv environments over HTTP: reset and step over a WebSocket, where every connection has its own game.

::

    ws    {"type": "reset", "data": {...}}   {"type": "step", "data": action}   {"type": "close"}
    http  POST /reset {...}                  POST /step {"action": action}      (whatever game the server has)
    both  reply {"observation": {...}, "reward": 1.0, "done": false}, the first within {"type": ..., "data": ...}
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles.core.errors import UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.environment import OpenResult, StepResult, import_package
from miles.rollout.tools.environments.text_games import derive_game_seed, extract_action
from miles.rollout.tools.tool import EnvironmentFailed, Message

_MAX_MESSAGE_BYTES = 16 << 20  # bytes of an answer
_MAX_PAUSE = 1.0  # seconds between two questions whether there is a place now
_FULL, _NOT_AN_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
_FIELDS = ("missing", "extra_forbidden")  # what pydantic calls a field that is not there, and one that should not be


class _ServerError(Exception):
    """The server refused a request with ``code``.

    ``wrong_fields``: the action lacks fields or has unknown ones, whatever their values.
    """

    def __init__(self, code: str, why: str, *, wrong_fields: bool = False) -> None:
        super().__init__(why)
        self.code = code
        self.wrong_fields = wrong_fields


class OpenEnvEnvironment:
    """``url`` of a server: ``http://host``, or of its WebSocket, ``ws://host/ws``.

    An action is an object with the reply's text under ``action`` (or all of it, where it is a JSON object and
    ``action`` is empty); what is observed is the text under ``observation``, or the whole object as JSON. A full server
    is retried for ``patience`` seconds. ``posts`` sends POST requests instead: OpenEnv answers each of those from a
    fresh environment, so that is for servers which keep a game between requests, for one trajectory at a time.
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
        self._url = url.rstrip("/") if posts else _websocket_url(url)
        self._action = action
        self._observation = observation
        self._reset = reset
        self._seconds = seconds
        self._patience = patience
        self._posts = posts
        self._http: Any = None
        self._socket_reader: _WebSocket | None = None

    async def open(self, prompt: Prompt) -> OpenResult:
        aiohttp = import_package("aiohttp", environment="openenv", install="miles-rl[environments]")
        self._errors = (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._seconds))
        prompt_reset = prompt.metadata.get("reset", {})
        reset_data = {
            "seed": derive_game_seed(prompt),
            **self._reset,
            **(prompt_reset if isinstance(prompt_reset, Mapping) else {}),
        }
        try:
            first = await self._reset_game(reset_data)
        except _ServerError as error:
            raise EnvironmentFailed(f"{self._url} refused reset: {error}") from error
        return OpenResult(messages=(*prompt.messages, self._observation_message(first)), provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        """Send the action; a reply that is no valid action gets the error, and the game goes on."""
        try:
            reply_data = await self._request("step", self._act(extract_action(reply)))
        except _ServerError as error:
            if error.wrong_fields and self._action:
                fix = "write the field's name as action, or nothing there for replies that are JSON objects"
                raise UsageError(
                    f"{self._url} takes no action of a field {self._action!r} ({error}); {fix}."
                ) from error
            if error.code == _NOT_AN_ACTION:
                return StepResult(messages=[{"role": "user", "content": f"Error: {error}"}])
            raise EnvironmentFailed(f"{self._url} refused step: {error}") from error
        reward = reply_data.get("reward")
        done = bool(reply_data.get("done"))
        messages = () if done else (self._observation_message(reply_data),)
        return StepResult(messages=messages, reward=None if reward is None else float(reward), done=done)

    async def close(self) -> None:
        if self._socket_reader is not None:
            await self._socket_reader.close()
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

    async def _reset_game(self, reset_data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Start a game, once the server has capacity for it; returns the first observation."""
        if self._posts:
            return await self._request("reset", reset_data)
        loop = asyncio.get_running_loop()
        until, pause = loop.time() + self._patience, 0.01
        while True:
            try:
                self._socket_reader = _WebSocket(
                    await self._http.ws_connect(self._url, max_msg_size=_MAX_MESSAGE_BYTES)
                )
            except self._errors as error:
                raise self._failure("could not be reached", error) from error
            try:
                return await self._request("reset", reset_data)
            except _ServerError as error:
                if error.code != _FULL or loop.time() + pause > until:
                    raise
            await self._socket_reader.close()
            await asyncio.sleep(pause)
            pause = min(2 * pause, _MAX_PAUSE)

    async def _request(self, message_type: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            if self._socket_reader is None:
                return await self._over_http(message_type, data)
            async with asyncio.timeout(self._seconds):
                reply_data = await self._socket_reader.request({"type": message_type, "data": dict(data)})
            if reply_data is None:
                raise EnvironmentFailed(
                    f"{self._url} hung up at {message_type} (code {self._socket_reader.close_code})"
                )
            answer = json.loads(reply_data)
            if answer["type"] == "error":
                raise _parse_error(answer["data"])
            return answer["data"]
        except self._errors as error:
            raise self._failure(f"did not do {message_type}", error) from error

    async def _over_http(self, message_type: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        body = dict(data) if message_type == "reset" else {"action": dict(data)}
        async with self._http.post(f"{self._url}/{message_type}", json=body) as response:
            text = await response.text()
            if response.status == 422:
                raise _parse_error(
                    {"code": _NOT_AN_ACTION, "message": "Invalid message", "errors": json.loads(text)["detail"]}
                )
            if response.status != 200:
                raise _ServerError("", f"status {response.status} ({text[:200]})")
            return json.loads(text)

    def _observation_message(self, reply_data: Mapping[str, Any]) -> dict[str, Any]:
        observation = reply_data["observation"]
        if self._observation:
            observation = observation[self._observation]
        elif isinstance(observation, Mapping):  # metadata is not for the player
            observation = {key: value for key, value in observation.items() if key != "metadata"}
        return {
            "role": "user",
            "content": observation if isinstance(observation, str) else json.dumps(observation, ensure_ascii=False),
        }

    def _failure(self, what: str, error: BaseException) -> EnvironmentFailed:
        reason = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return EnvironmentFailed(f"{self._url} {what} ({reason})")


class _WebSocket:
    """A WebSocket with a background reader, which answers pings while the policy generates for minutes."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._received: asyncio.Queue[str | None] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    @property
    def close_code(self) -> int | None:
        return self._socket.close_code

    async def request(self, question: Mapping[str, Any]) -> str | None:
        """Send a message and return the server's; None when it closed the connection."""
        # A full server says so and closes, perhaps before the request: that message is still to be read.
        with suppress(ConnectionError):
            await self._socket.send_json(question)
        return await self._received.get()

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
                self._received.put_nowait(message.data)
        self._received.put_nowait(None)


def _websocket_url(url: str) -> str:
    """The WebSocket address of a server: OpenEnv serves games at /ws."""
    bare = url.rstrip("/").replace("http", "ws", 1) if url.startswith("http") else url.rstrip("/")
    return bare if bare.endswith("/ws") else f"{bare}/ws"


def _parse_error(data: Mapping[str, Any]) -> _ServerError:
    """Parse an error message, with the invalid fields of an action."""
    errors = data.get("errors", ())
    wrong = [": ".join([*map(str, each["loc"]), each["msg"]]) for each in errors]
    wrong_fields = any(each["type"] in _FIELDS for each in errors)
    return _ServerError(str(data.get("code")), "; ".join([str(data.get("message")), *wrong]), wrong_fields=wrong_fields)
