"""Scores of lm-evaluation-harness: a task's own filters and metrics, on one response. Run in a worker process."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cache
from numbers import Real
from typing import Any

from miles.core.errors import DataError
from miles.core.protocols import RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.data.lm_eval import ENTRY, TaskError, load_task, parse_lm_eval
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.types import BadLabel, Metadata, get_response_text

_GRADE = "miles.rollout.reward.lm_eval:grade"
_WORKERS = 2
_CALL_SECONDS = 600.0  # of a call; the first of a process loads the task and its data
_MEMORY_BYTES = 64 << 30  # of address space: the package imports torch, and maps its data into memory


def build_lm_eval_reward(context: GraderContext) -> RewardFn:
    """Build the reward; its processes are its own, since they need more memory and a longer first call than others."""
    pool = GraderPool(_WORKERS, seconds=_CALL_SECONDS, memory=_MEMORY_BYTES)

    async def reward(prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = get_response_text("lm_eval", trajectory)
        try:
            scores = await pool.call(_GRADE, reply, "", dict(prompt.metadata))
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by lm_eval: {error}.") from error
        return Reward(value=scores["score"], parts=scores)

    return reward


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """All metrics of a response, named as the package names them (``exact_match,strict-match``), and ``score``.

    ``score`` is the task's first metric under its first filter. The response ends at the task's first stop string.
    """
    entry = metadata.get(ENTRY)
    if not isinstance(entry, Mapping) or not {"path", "doc_id"} <= entry.keys():
        raise BadLabel(f"its metadata has no {ENTRY} with path and doc_id, as prompts of lm_eval:TASK have")
    task, instances = _load(entry["path"])
    instance = copy(instances[entry["doc_id"]])
    instance.resps = [_cut_at_stop(reply, instance.args[1].get("until"))]
    instance.filtered_resps = {}
    for each in task._filters:  # what task.apply_filters applies to all its instances
        each.apply([instance])
    scores: dict[str, float] = {}
    for name, filtered in instance.filtered_resps.items():
        for metric, value in task.process_results(instance.doc, [filtered]).items():
            if isinstance(value, Real) and _is_mean(task, metric):
                scores[f"{metric},{name}"] = float(value)
    if not scores:
        raise BadLabel(f"no metric of {task.config.task} is a mean over responses")
    return {"score": next(iter(scores.values())), **scores}


@cache
def _load(path: str) -> tuple[Any, dict[int, Any]]:
    """The task, and its requests by the number of their document."""
    try:
        task = load_task(parse_lm_eval(path))
    except TaskError as error:
        raise BadLabel(f"{path} {error}") from error
    task.build_all_requests()
    return task, {instance.doc_id: instance for instance in task.instances}


def _cut_at_stop(reply: str, until: str | list[str] | None) -> str:
    """The response up to the first stop string, where the package's engines would have ended it."""
    stops = [until] if isinstance(until, str) else until or []
    ends = [found for stop in stops if stop and (found := reply.find(stop)) >= 0]
    return reply[: min(ends)] if ends else reply


def _is_mean(task: Any, metric: str) -> bool:
    """Whether the package reports the mean of a metric; corpus metrics such as BLEU are computed over all responses."""
    aggregate = task.aggregation().get(metric)
    return aggregate is None or getattr(aggregate, "__name__", "") == "mean"
