"""Upstream's functions of a whole step, behind our doors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np

from miles.core.errors import PlugError
from miles.core.plugs import AllSamples, EvalLog, PostProcess, RolloutLog
from miles.core.types import Batch, Group, Sample, Status
from miles.plug.upstream.convert import samples_of
from miles.plug.upstream.run import Run


def all_samples(function: Callable[..., Any], run: Run) -> AllSamples:
    """``f(args, samples[, data source])``: all groups, kept and dropped; there is no data source to be handed."""
    wants = [p for p in signature(function).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL]

    def process(step: int, kept: Sequence[Group], dropped: Sequence[Group]) -> None:
        samples = [samples_of(run, group) for group in (*kept, *dropped)]
        function(run.args, samples, *([None] if len(wants) > 2 else []))

    return process


def post_process(function: Callable[..., Any], run: Run) -> PostProcess:
    """``f(args, rollout_data)``, with a dict of lists, one entry a sample; loss masks it changes are taken back."""

    def process(batch: Batch) -> Batch:
        starts = [_start(sample) for sample in batch.samples]
        data: dict[str, list[Any]] = {
            "tokens": [s.tokens.tolist() for s in batch.samples],
            "total_lengths": [len(s) for s in batch.samples],
            "response_lengths": [len(s) - at for s, at in zip(batch.samples, starts, strict=True)],
            "loss_masks": [s.mask[at:].astype(int).tolist() for s, at in zip(batch.samples, starts, strict=True)],
            "rollout_log_probs": [s.logprobs[at:].tolist() for s, at in zip(batch.samples, starts, strict=True)],
            "advantages": [s.advantages[at:].tolist() for s, at in zip(batch.samples, starts, strict=True)],
            "rewards": [s.reward for s in batch.samples],
        }
        function(run.args, data)
        rows = [_masked(s, at, m) for s, at, m in zip(batch.samples, starts, data["loss_masks"], strict=True)]
        return replace(batch, samples=tuple(rows))

    return process


def rollout_log(function: Callable[..., Any], run: Run) -> RolloutLog:
    """``f(rollout_id, args, samples, metrics, seconds) -> bool``: true keeps the run from logging the metrics itself.

    What it adds to the dict of metrics is logged with them. Seconds are not among what is measured here, and are 0.
    """

    def log(step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Mapping[str, float]:
        told = dict(metrics)
        samples = [sample for group in groups for sample in samples_of(run, group)]
        return {} if function(step - 1, run.args, samples, told, 0.0) else told

    return log


def eval_log(function: Callable[..., Any], run: Run) -> EvalLog:
    """``f(rollout_id, args, data, metrics) -> bool``; ``data`` has rewards, truncations and samples of each set."""

    def log(step: int, groups: Mapping[str, Sequence[Group]], metrics: Mapping[str, float]) -> Mapping[str, float]:
        told = dict(metrics)
        data = {
            name: {
                "rewards": [reward for group in found for reward in group.rewards],
                "truncated": [t.status is Status.TRUNCATED for group in found for t in group.trajectories],
                "samples": [sample for group in found for sample in samples_of(run, group)],
            }
            for name, found in groups.items()
        }
        return {} if function(step, run.args, data, told) else told

    return log


def init(function: Callable[..., Any], run: Run) -> Callable[[Any], None]:
    """``f(args)``, called when the model is there."""

    def begin(model: Any) -> None:
        function(run.args)

    return begin


def _start(sample: Sample) -> int:
    """Where what is trained on begins."""
    return int(np.argmax(sample.mask)) if sample.mask.any() else len(sample)


def _masked(sample: Sample, start: int, told: Sequence[int]) -> Sample:
    mask = np.zeros(len(sample), bool)
    if len(told) != len(sample) - start:
        raise PlugError(
            f"The post-processed loss mask of a sample has {len(told)} entries for a response of "
            f"{len(sample) - start}; it keeps its length."
        )
    mask[start:] = np.asarray(told, bool)
    if (mask & ~sample.mask).any():
        raise PlugError("The post-processed loss mask trains on a token that it did not; it may only leave tokens out.")
    return replace(sample, mask=mask)
