"""A user's own agent: an async function that is given an address and talks to the policy there as to any other model.

::

    sessions.open --base_url--> agent(base_url, prompt, request_kwargs, metadata) --HTTP--> session server --> engine
         |                          returns a dict (``reward``, and what else goes into the metadata) or None
         `-- the session's tokens ------------------------------------------------------------------> trajectory

An agent that raises or asks nothing marks its attempt failed, with the reason; one that takes too long is cut short.
Either way, and when the run itself stops waiting, its ``abort``, if it has one, is called to stop what it started.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from numbers import Real
from typing import Any, Protocol

from miles.core.errors import MilesError, PlugError
from miles.core.protocols import Engine, Sampling
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.generate.failures import Failures

_ABORT_SECONDS = 10.0
_ENDED = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


class Agent(Protocol):
    """Answers a prompt by asking the policy at ``base_url`` (``/v1/chat/completions`` and the like stand behind it).

    All are given by name. ``request_kwargs`` go into every request; ``metadata`` is the prompt's. A function that has
    an argument ``label``, ``agent_config`` or ``session_id``, or takes any, is given those as well.
    """

    async def __call__(
        self, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]
    ) -> Mapping[str, Any] | None: ...


class Abort(Protocol):
    """Stop what an agent started elsewhere for the attempt whose address this is."""

    async def __call__(self, base_url: str, metadata: dict[str, Any]) -> None: ...


class Seat(Protocol):
    """One session, as an attempt sees it. Of the trajectory's metadata, ``turns`` is how many replies there were, and
    ``reason`` why the last ended (stop, length or abort), as session.Session has it."""

    @property
    def id(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    def trajectory(
        self, *, status: Status, reward: Reward | None = None, metadata: Mapping[str, Any] = EMPTY
    ) -> Trajectory: ...


class Sessions(Protocol):
    """Opens a session on the server. What is sampled in it is drawn as ``sampling`` says unless a request says more;
    when it closes, requests under way are ended and later ones refused."""

    def open(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> AbstractAsyncContextManager[Seat]: ...


class AgentGenerate:
    """A core.protocols.Generate. ``config`` is given to agents that have an argument ``agent_config``."""

    def __init__(
        self,
        agent: Agent,
        sessions: Sessions,
        *,
        abort: Abort | None = None,
        wall_seconds: float = 3600.0,
        config: Mapping[str, Any] = EMPTY,
        most_failures: int = 128,
    ) -> None:
        self._agent = agent
        self._sessions = sessions
        self._abort = abort
        self._wall_seconds = wall_seconds
        self._config = config
        self._failures = Failures("The agent", most_failures)
        parameters = inspect.signature(agent).parameters.values()
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._takes = frozenset(parameter.name for parameter in parameters)

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        async with self._sessions.open(prompt, engine, sampling) as seat:
            told, failure, late = await self._run(prompt, seat, sampling)
            reward = _reward(told.pop("reward", None))
            trajectory = seat.trajectory(status=Status.COMPLETED, reward=reward, metadata=told)
        trajectory = _judged(trajectory, failure, late)
        self._failures.count(prompt, trajectory.metadata.get("failure"))
        return trajectory

    async def _run(self, prompt: Prompt, seat: Seat, sampling: Sampling) -> tuple[dict[str, Any], str | None, bool]:
        """What the agent gave back, why it failed if it did, and whether it was cut short."""
        metadata = dict(prompt.metadata)
        limit = asyncio.timeout(self._wall_seconds)
        try:
            async with limit:
                given = await self._agent(
                    base_url=seat.base_url,
                    prompt=[dict(message) for message in prompt.messages],
                    request_kwargs=request_kwargs(sampling),
                    metadata=metadata,
                    **self._extras(prompt, seat),
                )
        except MilesError:
            raise
        except asyncio.CancelledError:
            await self._aborted(seat, metadata)
            raise
        except Exception as error:
            await self._aborted(seat, metadata)
            if isinstance(error, TimeoutError) and limit.expired():
                return {}, None, True
            return {}, f"{type(error).__name__}: {error}", False
        if given is not None and not isinstance(given, Mapping):
            raise PlugError(f"The agent gave a {type(given).__name__}; return a dict or None.")
        return dict(given or {}), None, False

    def _extras(self, prompt: Prompt, seat: Seat) -> dict[str, Any]:
        known = {"label": prompt.label, "agent_config": dict(self._config), "session_id": seat.id}
        return {name: value for name, value in known.items() if self._takes_any or name in self._takes}

    async def _aborted(self, seat: Seat, metadata: dict[str, Any]) -> None:
        if self._abort is None:
            return
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._abort(base_url=seat.base_url, metadata=metadata)
        except Exception:  # it was a courtesy to what is elsewhere; the attempt has ended, and says why itself
            return


def request_kwargs(sampling: Sampling) -> dict[str, Any]:
    """How tokens are drawn, in the words of OpenAI's requests; the rest the session knows."""
    said: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    return said | ({"stop": list(sampling.stop)} if sampling.stop else {})


def abort_of(agent: Any) -> Abort | None:
    """The function ``abort`` that stands beside an agent in its module, if there is one."""
    module = sys.modules.get(inspect.unwrap(agent).__module__)
    found = vars(module).get("abort") if module is not None else None
    return found if inspect.iscoroutinefunction(found) else None


def _reward(given: Any) -> Reward | None:
    if given is None or isinstance(given, Reward):
        return given
    if isinstance(given, bool) or not isinstance(given, Real):
        raise PlugError(f"The agent gave {given!r} as the reward; give a number, or leave it to the reward function.")
    return Reward(value=float(given))


def _judged(trajectory: Trajectory, failure: str | None, late: bool) -> Trajectory:
    """The trajectory with the status that how it ended comes to."""
    replies, reason = trajectory.metadata["turns"], trajectory.metadata["reason"]
    status, told = _ENDED.get(reason, Status.COMPLETED), {}
    if not replies:
        failure = failure or ("it took too long and" if late else "it") + " asked nothing of the address it was given"
    if failure is not None and not (replies and status is Status.ABORTED):
        status, told = Status.FAILED, {"reason": "agent", "failure": failure}
    elif late:
        status, told = Status.TRUNCATED, {"reason": "wall_time"}
    unscored = status in (Status.FAILED, Status.ABORTED)
    return replace(
        trajectory,
        status=status,
        reward=None if unscored else trajectory.reward,
        metadata={**trajectory.metadata, **told},
    )
