"""Environments served over HTTP as OpenEnv serves them: reset and step, over a WebSocket (a session each) or by POST.

::

    ws    {"type": "reset", "data": {...}}   {"type": "step", "data": action}   {"type": "close"}
    http  POST /reset {...}                  POST /step {"action": action}      (one game at a time a server)
    both  answer {"observation": {...}, "reward": 1.0, "done": false}, the first within {"type": ..., "data": ...}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.environments.textgame import action_of, seed_of
from miles.rollout.tools.tool import EnvironmentFailed, Message

_LONGEST = 16 << 20  # bytes of an answer


class OpenEnvEnvironment:
    """``url`` of a server: ``ws://host/ws`` or ``http://host`` (then it must give every connection its own game).

    An action is an object with the reply's text under ``action`` (or all of it, where it is a JSON object and
    ``action`` is empty); what is observed is the text under ``observation``, or the whole object as JSON.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str = "message",
        observation: str = "",
        reset: Mapping[str, Any] = EMPTY,
        seconds: float = 60.0,
    ) -> None:
        if not url.startswith(("http://", "https://", "ws://", "wss://")):
            raise UsageError(f"The environment openenv needs an http or ws address as url, and {url!r} is none.")
        self._url = url.rstrip("/")
        self._action = action
        self._observation = observation
        self._reset = reset
        self._seconds = seconds
        self._http: Any = None
        self._socket: Any = None

    async def open(self, prompt: Prompt) -> Opening:
        aiohttp = package("aiohttp", environment="openenv", install="miles-rl[serve]")
        self._errors = (aiohttp.ClientError, TimeoutError, ValueError, TypeError, KeyError)
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self._seconds))
        if self._url.startswith("ws"):
            try:
                self._socket = await self._http.ws_connect(self._url, max_msg_size=_LONGEST)
            except self._errors as error:
                raise self._failed("could not be reached", error) from error
        wanted = {"seed": seed_of(prompt), **self._reset, **_given(prompt)}
        first = await self._asked("reset", wanted)
        return Opening(messages=(*prompt.messages, self._seen(first)), scores=True)

    async def step(self, reply: Message) -> Step:
        said = await self._asked("step", self._act(action_of(reply)))
        reward = said.get("reward")
        done = bool(said.get("done"))
        messages = () if done else (self._seen(said),)
        return Step(messages=messages, reward=None if reward is None else float(reward), done=done)

    async def close(self) -> None:
        if self._socket is not None:
            if not self._socket.closed:
                await self._socket.send_json({"type": "close"})
            await self._socket.close()
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

    async def _asked(self, verb: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            return await (self._over_socket(verb, data) if self._socket is not None else self._over_http(verb, data))
        except self._errors as error:
            raise self._failed(f"did not do {verb}", error) from error

    async def _over_socket(self, verb: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        await self._socket.send_json({"type": verb, "data": dict(data)})
        answer = await self._socket.receive_json(timeout=self._seconds)
        if answer["type"] == "error":
            raise EnvironmentFailed(f"{self._url} refused {verb}: {answer['data'].get('message')}")
        return answer["data"]

    async def _over_http(self, verb: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        body = dict(data) if verb == "reset" else {"action": dict(data)}
        async with self._http.post(f"{self._url}/{verb}", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise EnvironmentFailed(f"{self._url} refused {verb}: status {response.status} ({text[:200]})")
            return json.loads(text)

    def _seen(self, said: Mapping[str, Any]) -> dict[str, Any]:
        seen = said["observation"]
        if self._observation:
            seen = seen[self._observation]
        return {"role": "user", "content": seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False)}

    def _failed(self, what: str, error: BaseException) -> EnvironmentFailed:
        said = "no answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return EnvironmentFailed(f"{self._url} {what} ({said})")


def _given(prompt: Prompt) -> Mapping[str, Any]:
    """What a prompt wants of its reset."""
    given = prompt.metadata.get("reset", {})
    return given if isinstance(given, Mapping) else {}
