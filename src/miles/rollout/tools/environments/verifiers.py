"""``verifiers`` environments: they drive the conversation themselves, so control is inverted here.

::

    open   --starts-->  env.rollout(row, client) --request--> our client --messages--> open returns them
    step   --reply---->                          <-reply---- our client
           <-messages-  ... requests again, or ends, is scored by its rubric, and step returns done

The client is OpenAI's, over a transport that queues requests instead of sending them. From version 0.4 on the package
has tasksets and episodes, whose programs get an HTTP address.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.tools.environment import OpenResult, StepResult, import_package
from miles.rollout.tools.environments.model_client import MODEL, PolicyRequests
from miles.rollout.tools.tool import EnvironmentFailed, Message

_VERSIONS = "'verifiers>=0.1.12,<0.5'"
_RewardAndParts = tuple[float, dict[str, float]]


class VerifiersEnvironment:
    """``id`` and ``settings`` are for ``verifiers.load_environment``, whose result all trajectories share.

    The prompt's metadata may hold ``answer``, ``info`` and ``task``, as rows of such environments do; the label is an
    answer too. The environment's own stop conditions, tools and rubric apply.

    From 0.4 on, ``id`` names a taskset and ``settings`` are those of an environment's config.
    """

    def __init__(self, id: str, *, settings: Mapping[str, Any] = EMPTY) -> None:
        self._id = id
        self._settings = settings
        self._verifiers = _import_verifiers()
        self._requests = PolicyRequests()
        self._pending_reply: asyncio.Future[Message] | None = None
        self._num_shown = 0
        self._running: asyncio.Task[_RewardAndParts] | None = None

    async def open(self, prompt: Prompt) -> OpenResult:
        self._running = asyncio.create_task(self._play(prompt))
        request = await self._next()
        if request is None:
            raise EnvironmentFailed("the verifiers environment ended before it asked anything")
        return OpenResult(messages=request["messages"], tools=request.get("tools") or (), provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        assert self._pending_reply is not None and self._running is not None
        self._pending_reply.set_result(reply)
        num_messages = self._num_shown + 1  # what it was shown, and the reply
        request = await self._next()
        if request is None:
            reward, parts = self._running.result()
            return StepResult(reward=reward, parts=parts, done=True)
        if _continues(request["messages"], num_messages, reply):
            return StepResult(messages=request["messages"][num_messages:])
        return StepResult(messages=request["messages"], replaces_history=True)

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _next(self) -> Mapping[str, Any] | None:
        """Await the next request; None when the environment has ended. Raises its error."""
        assert self._running is not None
        next_request = asyncio.create_task(self._requests.queue.get())
        try:
            await asyncio.wait({next_request, self._running}, return_when=asyncio.FIRST_COMPLETED)
            if not next_request.done():
                self._running.result()
                return None
            request, self._pending_reply = next_request.result()
        finally:
            next_request.cancel()
        self._num_shown = len(request["messages"])
        return request

    async def _play(self, prompt: Prompt) -> _RewardAndParts:
        if _has_episodes(self._verifiers):
            return await _run_episode(self._verifiers, self._id, self._settings, prompt, self._requests)
        environment = _load_environment(self._id, json.dumps(dict(self._settings), sort_keys=True))
        client = self._verifiers.OpenAIChatCompletionsClient(self._requests.client("verifiers"))
        state = await environment.rollout(_row(prompt), client, MODEL, {})
        if isinstance(state.get("error"), self._verifiers.EmptyModelResponseError):
            return 0.0, {}  # the policy said nothing at all, which is no failure of the environment's
        if state.get("error") is not None:
            raise EnvironmentFailed(f"the verifiers environment failed: {state['error']!r}")
        try:
            await environment.rubric.score_rollout(state)
        except AssertionError as error:  # which is how it refuses a rubric whose functions are of a whole group
            raise UsageError(
                f"The verifiers environment {self._id} cannot score a single trajectory: {error}"
            ) from error
        await environment.rubric.cleanup(state)
        return float(state["reward"]), {name: float(value) for name, value in (state.get("metrics") or {}).items()}


def _row(prompt: Prompt) -> dict[str, Any]:
    row = {
        "prompt": [dict(message) for message in prompt.messages],
        "answer": prompt.metadata.get("answer", prompt.label or ""),
        "info": dict(prompt.metadata.get("info") or {}),
        "example_id": prompt.id,
    }
    # What a task is differs between versions (a route, a payload), so there is one only where the data has one.
    return row | ({"task": prompt.metadata["task"]} if "task" in prompt.metadata else {})


def _continues(messages: list[Message], num_messages: int, reply: Message) -> bool:
    """Whether the request starts with the messages shown and the reply."""
    if len(messages) <= num_messages:
        return False
    last = messages[num_messages - 1]
    return last.get("role") == "assistant" and (last.get("content") or "") == (reply.get("content") or "")


def _import_verifiers() -> Any:
    """The module with ``load_environment``: the package itself, or its ``v1`` from version 0.4 on."""
    verifiers = import_package("verifiers", environment="verifiers", install="miles-rl[environments]")
    if hasattr(verifiers, "load_environment") and hasattr(verifiers, "OpenAIChatCompletionsClient"):
        return verifiers
    newer = import_package("verifiers.v1", environment="verifiers", install=_VERSIONS)
    if not _has_episodes(newer):
        raise UsageError(f"This version of verifiers has an unknown kind of environments; pip install {_VERSIONS}.")
    return newer


def _has_episodes(verifiers: Any) -> bool:
    return hasattr(verifiers, "resolve_env_config")


@cache
def _load_environment(id: str, settings: str) -> Any:
    try:
        return _import_verifiers().load_environment(id, **json.loads(settings))
    except (ValueError, RuntimeError) as error:  # which is what it makes of all that goes wrong
        raise UsageError(f"The verifiers environment {id} cannot be loaded: {error}") from error


# -- verifiers >= 0.4: tasksets and episodes ------------------------------------------------


async def _run_episode(
    verifiers: Any, id: str, settings: Mapping[str, Any], prompt: Prompt, requests: PolicyRequests
) -> tuple[float, dict[str, float]]:
    """Play one episode; returns the mean reward and metrics of its trainable traces.

    The program needs an address, so one is served for each trajectory, and so is whatever the environment starts for
    its episodes. ``verifiers`` is the package's ``v1``. ``settings`` are an environment's own (``taskset``, ``agent``
    ...), whose taskset is ``id`` unless they name another.
    """
    environment = _load_v04_environment(verifiers, id, settings)
    task = _build_task(environment, prompt)
    async with requests.serve("verifiers") as address, environment.serving():
        client = verifiers.EvalClientConfig(base_url=address, api_key_var="MILES_POLICY_KEY")
        episode = await environment.run_episode(task, verifiers.ModelContext(model=MODEL, client=client))
    if not episode.ok:
        raise EnvironmentFailed(f"the verifiers environment failed: {_last_error(episode)}")
    return _mean_reward(episode)


def _load_v04_environment(verifiers: Any, id: str, settings: Mapping[str, Any]) -> Any:
    """The environment, loaded anew; UsageError when that fails."""
    try:
        config = verifiers.resolve_env_config({**settings, "taskset": {"id": id, **settings.get("taskset", {})}})
        return verifiers.load_environment(config)
    except (ImportError, TypeError, ValueError, AttributeError) as error:  # what its loaders raise of ids and settings
        raise UsageError(f"The verifiers environment {id} cannot be loaded: {error}") from error


def _build_task(environment: Any, prompt: Prompt) -> Any:
    """Convert a prompt to the environment's task type; ``metadata["task"]`` holds further fields."""
    kind = type(environment.taskset).task_type()
    given = prompt.metadata.get("task", {})
    system = [message["content"] for message in prompt.messages if message["role"] == "system"]
    rest = [dict(message) for message in prompt.messages if message["role"] != "system"]
    plain = len(rest) == 1 and isinstance(rest[0]["content"], str)
    fields = {
        "idx": prompt.id,
        "prompt": rest[0]["content"] if plain else rest,
        "system_prompt": "\n\n".join(system) or None,
        "answer": prompt.metadata.get("answer", prompt.label or ""),
        "info": dict(prompt.metadata.get("info") or {}),
        **(given if isinstance(given, Mapping) else {}),
    }
    try:
        return kind(kind.data_type().model_validate(fields), environment.taskset.config.task)
    except ValueError as error:
        raise DataError(
            f"Prompt {prompt.id} is no task of {type(environment.taskset).__name__}; put what is missing into "
            f"metadata['task']: {error}"
        ) from error


def _mean_reward(episode: Any) -> tuple[float, dict[str, float]]:
    trainable = [trace for trace in episode.traces if trace.agent.trainable]
    if not trainable:
        raise EnvironmentFailed("the verifiers environment has no trace that is for training")
    parts: dict[str, float] = {}
    for trace in trainable:
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in {**metrics, **scores}.items():
            parts[name] = parts.get(name, 0.0) + float(value) / len(trainable)
    return sum(trace.reward for trace in trainable) / len(trainable), parts


def _last_error(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "it does not say why"
