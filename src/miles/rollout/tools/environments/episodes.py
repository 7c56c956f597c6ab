"""Environments of ``verifiers`` from 0.4 on: a set of tasks, and a program (a harness) that plays each as an episode.

The program speaks to an address, so that one is served for each attempt. What such an environment starts for all of its
episodes (tool servers, its own relay) is started for each attempt as well, and ends with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.tools.environments.asking import MODEL, Desk
from miles.rollout.tools.tool import EnvironmentFailed


async def episode(
    verifiers: Any, id: str, settings: Mapping[str, Any], prompt: Prompt, desk: Desk
) -> tuple[float, dict[str, float]]:
    """Play one, and say what it was worth: the mean over the traces that are for training, and their metrics.

    ``verifiers`` is the package's ``v1``. ``settings`` are an environment's own (``taskset``, ``agent`` and the like),
    whose taskset is ``id`` unless they name another.
    """
    made = environment(verifiers, id, settings)
    task = task_of(made, prompt)
    async with desk.served("verifiers") as address, made.serving():
        client = verifiers.EvalClientConfig(base_url=address, api_key_var="MILES_POLICY_KEY")
        played = await made.run_episode(task, verifiers.ModelContext(model=MODEL, client=client))
    if not played.ok:
        raise EnvironmentFailed(f"the verifiers environment failed: {_complaint(played)}")
    return _worth(played)


def environment(verifiers: Any, id: str, settings: Mapping[str, Any]) -> Any:
    """The environment, made anew; UsageError when it cannot be."""
    try:
        config = verifiers.resolve_env_config({**settings, "taskset": {"id": id, **settings.get("taskset", {})}})
        return verifiers.load_environment(config)
    except (ImportError, TypeError, ValueError, AttributeError) as error:  # what its loaders raise of ids and settings
        raise UsageError(f"The verifiers environment {id} cannot be loaded: {error}") from error


def task_of(made: Any, prompt: Prompt) -> Any:
    """The prompt as a task of the environment's kind: ``metadata["task"]`` holds the fields its data has besides."""
    kind = type(made.taskset).task_type()
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
        return kind(kind.data_type().model_validate(fields), made.taskset.config.task)
    except ValueError as error:
        raise DataError(
            f"Prompt {prompt.id} is no task of {type(made.taskset).__name__}; put what is missing into "
            f"metadata['task']: {error}"
        ) from error


def _worth(played: Any) -> tuple[float, dict[str, float]]:
    counted = [trace for trace in played.traces if trace.agent.trainable]
    if not counted:
        raise EnvironmentFailed("the verifiers environment has no trace that is for training")
    parts: dict[str, float] = {}
    for trace in counted:
        scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        for name, value in {**metrics, **scores}.items():
            parts[name] = parts.get(name, 0.0) + float(value) / len(counted)
    return sum(trace.reward for trace in counted) / len(counted), parts


def _complaint(played: Any) -> str:
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    return f"{errors[-1].type}: {errors[-1].message}" if errors else "it does not say why"
