"""Upstream's functions of one attempt or one group, behind our doors."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np

from miles.core import types
from miles.core.errors import PlugError
from miles.core.plugs import BufferFilter, SampleFilter
from miles.core.protocols import Credit, Engine, Filter, Generate, GroupRewardFn, RewardFn, Sampling, Verdict, Worth
from miles.core.types import Author, Group, Prompt, Reward, Trajectory, Version
from miles.plug.upstream.convert import blank, reward_of, sample_of, samples_of, trajectory_of
from miles.plug.upstream.engine import Attempt, as_parameters, attempting
from miles.plug.upstream.run import Run
from miles.plug.upstream.sample import DynamicFilterOutput

_EVALUATES: ContextVar[bool] = ContextVar("evaluates", default=False)


def evaluating(generate: Generate) -> Generate:
    """The same, telling upstream's functions that what they answer is held out."""

    async def answer(prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        token = _EVALUATES.set(True)
        try:
            return await generate(prompt, engine, sampling)
        finally:
            _EVALUATES.reset(token)

    return answer


def generate(function: Callable[..., Awaitable[Any]], run: Run) -> Generate:
    """``async f(args, sample, sampling_params[, evaluation]) -> Sample``, or a list of them."""
    tells = "evaluation" in inspect.signature(function).parameters

    async def answer(prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        attempt = Attempt(run=run, engine=engine, sampling=sampling)
        told = {"evaluation": _EVALUATES.get()} if tells else {}
        with attempting(attempt):
            made = await function(run.args, blank(run, prompt), as_parameters(sampling), **told)
        return trajectory_of(run, prompt, attempt, made)

    return answer


def reward(function: Callable[..., Awaitable[Any]], run: Run) -> RewardFn:
    """``async f(args, sample) -> float | dict``."""

    async def score(prompt: Prompt, trajectory: Trajectory) -> Reward:
        return reward_of(run, await _waited(function(run.args, sample_of(run, prompt, trajectory))))

    return score


def group_reward(function: Callable[..., Awaitable[Any]], run: Run) -> GroupRewardFn:
    """``async f(args, samples) -> list``."""

    async def score(prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Reward]:
        samples = [sample_of(run, prompt, trajectory) for trajectory in trajectories]
        return [reward_of(run, given) for given in await _waited(function(run.args, samples))]

    return score


def group_filter(function: Callable[..., Any], run: Run) -> Filter:
    """``f(args, samples) -> bool | DynamicFilterOutput``."""

    def keep(group: Group) -> Verdict:
        return _verdict(function(run.args, samples_of(run, group)))

    return keep


def worth(function: Callable[..., Any], run: Run) -> Worth:
    """``f(args, samples) -> (raw rewards, rewards)``, asked group by group."""

    def value(group: Group) -> list[float]:
        made = function(run.args, samples_of(run, group))
        if not isinstance(made, tuple) or len(made) != 2:
            raise PlugError(
                "The reward post-process gave no pair of lists; it gives the rewards as they were and as they are "
                "trained on."
            )
        return [float(number) for number in made[1]]

    return value


def sample_filter(function: Callable[..., Any], run: Run) -> SampleFilter:
    """``f(args, samples) -> None``, which sets ``remove_sample``."""

    def keep(group: Group) -> list[bool]:
        samples = samples_of(run, group)
        function(run.args, samples)
        return [not sample.remove_sample for sample in samples]

    return keep


def buffer_filter(function: Callable[..., Any], run: Run) -> BufferFilter:
    """``f(args, rollout_id, buffer, num_samples) -> groups``, asked of a buffer that holds one group."""

    def keep(group: Group, version: Version) -> Verdict:
        kept = function(run.args, version.number, [samples_of(run, group)], 1)
        return Verdict(keep=True) if kept else Verdict(keep=False, reason="buffer_filter")

    return keep


def credit(function: Callable[..., Mapping[str, Any]], run: Run) -> Credit:
    """``f(args, samples) -> dict`` of lists, asked group by group; each sample is one attempt's row.

    Of the dict are read ``tokens``, ``response_lengths``, ``loss_masks`` and ``rewards``; a mask may leave out what the
    policy wrote, and add nothing to it.
    """

    def convert(group: Group) -> list[types.Sample]:
        made = function(run.args, samples_of(run, group))
        if missing := [name for name in ("tokens", "loss_masks", "rewards") if name not in made]:
            raise PlugError(f"The converted train data has no {missing[0]}; it has a list of them, one a sample.")
        rows: list[types.Sample] = []
        for at, trajectory in enumerate(group.trajectories):
            rows += _rows(run, group.prompt, trajectory, at, made)
        return rows

    return convert


def _rows(run: Run, prompt: Prompt, trajectory: Trajectory, at: int, made: Mapping[str, Any]) -> list[types.Sample]:
    rows = run.rows(prompt.id, trajectory, worth=float(made["rewards"][at]), trained=Author.POLICY)
    if len(rows) > 1:
        raise PlugError(
            f"Attempt {trajectory.index} at prompt {prompt.id} has {len(rows)} branches, which upstream's train data "
            "has no place for; write the function as def (group: Group) -> Sequence[Sample]."
        )
    (row,) = rows
    tokens, kept = np.asarray(made["tokens"][at]), np.asarray(made["loss_masks"][at], bool)
    if not np.array_equal(tokens, row.tokens) or len(kept) > len(tokens):
        raise PlugError(
            f"The converted tokens of attempt {trajectory.index} at prompt {prompt.id} are not those that were "
            "sampled; log-probs and versions go by these, so pass them on as they are."
        )
    mask = np.zeros(len(tokens), bool)
    mask[len(tokens) - len(kept) :] = kept
    if (mask & ~row.mask).any():
        raise PlugError(
            f"The converted loss mask of attempt {trajectory.index} at prompt {prompt.id} trains on a token that the "
            "policy did not write; it may only leave tokens out."
        )
    return [replace(row, mask=mask, advantages=np.where(mask, row.advantages, np.float32(0)))]


def _verdict(answer: Any) -> Verdict:
    if isinstance(answer, DynamicFilterOutput):
        return Verdict(keep=bool(answer.keep), reason=answer.reason or ("kept" if answer.keep else "filter"))
    if not isinstance(answer, bool | np.bool_):
        raise PlugError(f"The filter gave a {type(answer).__name__}; it gives True, False or a DynamicFilterOutput.")
    return Verdict(keep=True) if answer else Verdict(keep=False, reason="filter")


async def _waited(made: Any) -> Any:
    """Upstream's rewards are async; a plain one is taken as well."""
    return await made if inspect.isawaitable(made) else made
