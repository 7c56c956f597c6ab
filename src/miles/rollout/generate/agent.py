"""Agent rollouts: a user's async function gets a base URL and talks to the policy there over an OpenAI-style API.

::

    sessions.open --base_url--> agent(base_url, prompt, request_kwargs, metadata) --HTTP--> session server --> engine
         |                          returns a dict (``reward``, and further metadata) or None
         `-- the session's tokens ------------------------------------------------------------------> trajectory

An agent that raises or sends no request marks its trajectory failed, with the reason; one that times out is truncated.
In both cases, and when the run itself stops waiting, the agent's ``abort``, if any, is called to stop what it started.
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

from miles.core.errors import HookError, MilesError, describe_error
from miles.core.media_store import MediaStore
from miles.core.protocols import Engine, SamplingParams
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.generate.dispatch import CircuitBreaker
from miles.rollout.images import inline_images
from miles.rollout.session.branches import TrajectoryPostProcess

_ABORT_SECONDS = 10.0
_STATUS_BY_REASON = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


class AgentFn(Protocol):
    """Answers a prompt by querying the policy at ``base_url`` (which serves ``/v1/chat/completions`` and the like).

    Arguments are passed by name. ``request_kwargs`` go into every request; ``metadata`` is the prompt's. A function
    with a parameter ``label``, ``agent_config``, ``session_id`` or ``api_key``, or with ``**kwargs``, gets those as
    well; a server that needs no key has ``api_key`` "none". The ``base_url`` holds a secret of this session;
    ``session_id`` is its name, which is the same in every run.
    """

    async def __call__(
        self, base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]
    ) -> Mapping[str, Any] | None: ...


class AbortFn(Protocol):
    """Stops what an agent started elsewhere for the trajectory with this address."""

    async def __call__(self, base_url: str, metadata: dict[str, Any]) -> None: ...


class AgentSession(Protocol):
    """One session of a trajectory; the last part of ``base_url`` is its secret. In the trajectory's metadata, ``turns``
    is the number of replies and ``reason`` why the last one ended (stop, length or abort), as session.Session sets
    them."""

    @property
    def id(self) -> str: ...
    @property
    def base_url(self) -> str: ...
    def trajectory(
        self, *, status: Status, reward: Reward | None = None, metadata: Mapping[str, Any] = EMPTY
    ) -> Trajectory: ...


class SessionFactory(Protocol):
    """Opens a session on the server. It samples with ``sampling`` unless a request overrides it; when it closes,
    requests in flight are cancelled and later ones refused."""

    def open(
        self, prompt: Prompt, engine: Engine, sampling: SamplingParams
    ) -> AbstractAsyncContextManager[AgentSession]: ...


class AgentGenerate:
    """A core.protocols.Generate. ``config`` is passed to agents with a parameter ``agent_config``, and the session
    server's ``api_key`` to those with a parameter of that name. ``postprocess`` may change what is trained on."""

    def __init__(
        self,
        agent: AgentFn,
        sessions: SessionFactory,
        *,
        abort: AbortFn | None = None,
        wall_seconds: float = 3600.0,
        config: Mapping[str, Any] = EMPTY,
        api_key: str | None = None,
        max_failures: int = 128,
        postprocess: TrajectoryPostProcess | None = None,
        media: MediaStore | None = None,
    ) -> None:
        self._media = media
        self._postprocess = postprocess
        self._agent = agent
        self._sessions = sessions
        self._abort = abort
        self._wall_seconds = wall_seconds
        self._config = config
        self._api_key = api_key or "none"
        self._breaker = CircuitBreaker("The agent", max_failures)
        parameters = inspect.signature(agent).parameters.values()
        self._has_var_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._parameter_names = frozenset(parameter.name for parameter in parameters)

    @property
    def takes_key(self) -> bool:
        """Whether the agent gets the API key."""
        return self._has_var_keyword or "api_key" in self._parameter_names

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        async with self._sessions.open(prompt, engine, sampling) as session:
            result, failure, late = await self._run(prompt, session, sampling)
            reward = _parse_reward(result.pop("reward", None))
            trajectory = session.trajectory(status=Status.COMPLETED, reward=reward, metadata=result)
        trajectory = _finish(trajectory, failure, late)
        self._breaker.record(prompt, trajectory.metadata.get("failure"))
        if self._postprocess is None or trajectory.status is Status.FAILED:
            return trajectory
        processed = self._postprocess(trajectory)
        if not isinstance(processed, Trajectory):
            raise HookError(
                f"--session-sample-postprocessor-path gave a {type(processed).__name__}; it gives the "
                "miles.core.types.Trajectory to train on."
            )
        return processed

    async def _run(
        self, prompt: Prompt, session: AgentSession, sampling: SamplingParams
    ) -> tuple[dict[str, Any], str | None, bool]:
        """Run the agent; returns its result, the failure if any, and whether it timed out."""
        metadata = dict(prompt.metadata)
        limit = asyncio.timeout(self._wall_seconds)
        try:
            async with limit:
                returned = await self._agent(
                    base_url=session.base_url,
                    prompt=await self._show_messages(prompt),
                    request_kwargs=build_request_kwargs(sampling),
                    metadata=metadata,
                    **self._optional_arguments(prompt, session),
                )
        except MilesError:
            raise
        except asyncio.CancelledError:
            await self._call_abort(session, metadata)
            raise
        except Exception as error:
            await self._call_abort(session, metadata)
            if isinstance(error, TimeoutError) and limit.expired():
                return {}, None, True
            return {}, redact_key(describe_error(error), session), False
        if returned is not None and not isinstance(returned, Mapping):
            raise HookError(f"The agent gave a {type(returned).__name__}; return a dict or None.")
        return redact_key(dict(returned or {}), session), None, False

    async def _show_messages(self, prompt: Prompt) -> list[dict[str, Any]]:
        """The prompt's messages, with images as data URLs in OpenAI's format."""
        if self._media is None:
            return [dict(message) for message in prompt.messages]
        return await asyncio.to_thread(inline_images, prompt.messages, self._media)

    def _optional_arguments(self, prompt: Prompt, session: AgentSession) -> dict[str, Any]:
        available = {
            "label": prompt.label,
            "agent_config": dict(self._config),
            "session_id": session.id,
            "api_key": self._api_key,
        }
        return {
            name: value for name, value in available.items() if self._has_var_keyword or name in self._parameter_names
        }

    async def _call_abort(self, session: AgentSession, metadata: dict[str, Any]) -> None:
        if self._abort is None:
            return
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self._abort(base_url=session.base_url, metadata=metadata)
        except Exception:  # best effort: the trajectory has ended and has its own reason
            return


def build_request_kwargs(sampling: SamplingParams) -> dict[str, Any]:
    """Sampling parameters as OpenAI request fields; the session adds the rest."""
    kwargs: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
    }
    return kwargs | ({"stop": list(sampling.stop)} if sampling.stop else {})


def redact_key(value: Any, session: AgentSession) -> Any:
    """``value``, which is to be recorded, with the session's name in place of the secret in its URL.

    HTTP clients put URLs into their error messages.
    """
    if isinstance(value, str):
        return value.replace(session.base_url.rpartition("/")[2], session.id)
    if isinstance(value, dict):
        return {redact_key(key, session): redact_key(item, session) for key, item in value.items()}
    return type(value)(redact_key(item, session) for item in value) if type(value) in (list, tuple) else value


def find_abort_hook(agent: Any) -> AbortFn | None:
    """The function ``abort`` in an agent's module, if there is one."""
    module = sys.modules.get(inspect.unwrap(agent).__module__)
    abort_fn = vars(module).get("abort") if module is not None else None
    return abort_fn if inspect.iscoroutinefunction(abort_fn) else None


def _parse_reward(returned: Any) -> Reward | None:
    if returned is None or isinstance(returned, Reward):
        return returned
    if isinstance(returned, bool) or not isinstance(returned, Real):
        raise HookError(
            f"The agent gave {returned!r} as the reward; give a number, or leave it to the reward function."
        )
    return Reward(value=float(returned))


def _finish(trajectory: Trajectory, failure: str | None, late: bool) -> Trajectory:
    """The trajectory with its final status."""
    replies, reason = trajectory.metadata["turns"], trajectory.metadata["reason"]
    status, result = _STATUS_BY_REASON.get(reason, Status.COMPLETED), {}
    if not replies:
        failure = failure or ("it timed out and" if late else "it") + " sent no request to its base_url"
    if failure is not None and not (replies and status is Status.ABORTED):
        status, result = Status.FAILED, {"reason": "agent", "failure": failure}
    elif late:
        status, result = Status.TRUNCATED, {"reason": "wall_time"}
    unscored = status in (Status.FAILED, Status.ABORTED)
    return replace(
        trajectory,
        status=status,
        reward=None if unscored else trajectory.reward,
        metadata={**trajectory.metadata, **result},
    )
