"""Adapters from upstream signatures ``(args, sample, ...)`` to our hook protocols: one function per protocol."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from inspect import signature
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from miles.core.errors import HookError, TrajectoryError
from miles.core.hooks import (
    AllSamples,
    BufferFilter,
    DataBuffer,
    DataSource,
    EvalLog,
    PostProcess,
    PostSave,
    RolloutLog,
    SampleFilter,
)
from miles.core.protocols import (
    AdvantageEstimator,
    AdvantageFn,
    Engine,
    Filter,
    FilterResult,
    Generate,
    GroupRewardFn,
    RewardFn,
    SamplingParams,
)
from miles.core.token_fields import SAMPLING_FIELDS
from miles.core.types import Author, Batch, Group, Prompt, Reward, Sample, Span, Status, Trajectory, Version
from miles.hooks.compat.convert import (
    build_failed_trajectory,
    build_pending_sample,
    prompt_from_sample,
    reward_from_upstream,
    sample_from_trajectory,
    samples_from_group,
    trajectory_from_samples,
)
from miles.hooks.compat.data_source import provide_prompts
from miles.hooks.compat.engine import TrajectoryRequests, record_requests, sampling_params_dict
from miles.hooks.compat.generation import call_generate_function
from miles.hooks.compat.generation import run as run_coroutine
from miles.hooks.compat.tracking import collect_logged
from miles.hooks.compat.types import (
    DataBufferConstructorInput,
    DataBufferInput,
    DynamicFilterOutput,
    UpstreamContext,
    UpstreamSample,
    UpstreamStatus,
)

_BUFFER_SECONDS = 60.0
_IS_EVALUATION: ContextVar[bool] = ContextVar("evaluates", default=False)


def mark_evaluation(adapt_generate: Generate) -> Generate:
    """Wrap ``generate`` so that upstream functions see ``evaluation=True``."""

    async def answer(prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        token = _IS_EVALUATION.set(True)
        try:
            return await adapt_generate(prompt, engine, sampling)
        finally:
            _IS_EVALUATION.reset(token)

    return answer


def adapt_generate(function: Callable[..., Awaitable[Any]], run: UpstreamContext) -> Generate:
    """``async f(args, sample, sampling_params[, evaluation]) -> Sample``, or a list of them; or
    ``async f(input: GenerateFnInput) -> GenerateFnOutput``."""

    async def answer(prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        evaluation = _IS_EVALUATION.get()
        requests = TrajectoryRequests(run=run, engine=engine, sampling=sampling, evaluation=evaluation)
        with record_requests(requests):
            result = await call_generate_function(
                function, run.args, build_pending_sample(run, prompt), sampling_params_dict(sampling), evaluation
            )
        try:
            return trajectory_from_samples(run, prompt, requests, result)
        except TrajectoryError as error:  # such as text that is tokenized differently in a later turn
            return build_failed_trajectory(run, prompt, str(error))

    return answer


def adapt_agent(function: Callable[..., Awaitable[Any]], run: UpstreamContext) -> Callable[..., Awaitable[Any]]:
    """``async f(base_url, prompt, request_kwargs)``, without the prompt's metadata."""

    async def call(base_url: str, prompt: Any, request_kwargs: dict[str, Any], metadata: dict[str, Any]) -> Any:
        return await function(base_url, prompt, request_kwargs)

    return call


def adapt_reward(function: Callable[..., Awaitable[Any]], run: UpstreamContext) -> RewardFn:
    """``async f(args, sample) -> float | dict``."""

    async def score(prompt: Prompt, trajectory: Trajectory) -> Reward:
        return reward_from_upstream(
            run, await _maybe_await(function(run.args, sample_from_trajectory(run, prompt, trajectory)))
        )

    return score


def adapt_group_reward(function: Callable[..., Awaitable[Any]], run: UpstreamContext) -> GroupRewardFn:
    """``async f(args, samples) -> list``."""

    async def score(prompt: Prompt, trajectories: Sequence[Trajectory]) -> list[Reward]:
        samples = [sample_from_trajectory(run, prompt, trajectory) for trajectory in trajectories]
        return [reward_from_upstream(run, given) for given in await _maybe_await(function(run.args, samples))]

    return score


def adapt_filter(function: Callable[..., Any], run: UpstreamContext) -> Filter:
    """``f(args, samples) -> bool | DynamicFilterOutput``."""

    def keep(group: Group) -> FilterResult:
        return _to_filter_result(function(run.args, samples_from_group(run, group)))

    return keep


def adapt_advantage_fn(function: Callable[..., Any], run: UpstreamContext) -> AdvantageFn:
    """``f(args, samples) -> (raw rewards, rewards)``, called group by group."""

    def value(group: Group) -> list[float]:
        result = function(run.args, samples_from_group(run, group))
        if not isinstance(result, tuple) or len(result) != 2:
            raise HookError(
                "The reward post-process gave no pair of lists; it gives the rewards as they were and as they are "
                "trained on."
            )
        return [float(number) for number in result[1]]

    return value


def adapt_sample_filter(function: Callable[..., Any], run: UpstreamContext) -> SampleFilter:
    """``f(args, groups) -> None``, which sets ``remove_sample``, called with a list of one group."""

    def keep(group: Group) -> list[bool]:
        samples = samples_from_group(run, group)
        function(run.args, [samples])
        return [not sample.remove_sample for sample in samples]

    return keep


def adapt_buffer_filter(function: Callable[..., Any], run: UpstreamContext) -> BufferFilter:
    """``f(args, rollout_id, buffer, num_samples) -> groups``, called with a buffer of one group."""

    def keep(group: Group, version: Version) -> FilterResult:
        kept = function(run.args, version.number, [samples_from_group(run, group)], 1)
        return FilterResult(keep=True) if kept else FilterResult(keep=False, reason="buffer_filter")

    return keep


def adapt_advantage_estimator(function: Callable[..., Mapping[str, Any]], run: UpstreamContext) -> AdvantageEstimator:
    """``f(args, samples) -> dict`` of lists, called group by group; each sample is one trajectory.

    The keys ``tokens``, ``response_lengths``, ``loss_masks`` and ``rewards`` are read; a mask may exclude tokens of the
    policy, and add none.
    """

    def convert(group: Group) -> list[Sample]:
        result = function(run.args, samples_from_group(run, group))
        if missing := [name for name in ("tokens", "loss_masks", "rewards") if name not in result]:
            raise HookError(f"The converted train data has no {missing[0]}; it has a list of them, one a sample.")
        samples: list[Sample] = []
        for at, trajectory in enumerate(group.trajectories):
            samples += _samples_with_mask(run, group.prompt, trajectory, at, result)
        return samples

    return convert


def adapt_all_samples(function: Callable[..., Any], run: UpstreamContext) -> AllSamples:
    """``f(args, samples[, data source])``: all groups, kept and dropped; the data source is None."""
    required = [
        p for p in signature(function).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]

    def process(step: int, kept: Sequence[Group], dropped: Sequence[Group]) -> None:
        samples = [samples_from_group(run, group) for group in (*kept, *dropped)]
        function(run.args, samples, *([None] if len(required) > 2 else []))

    return process


def adapt_post_process(function: Callable[..., Any], run: UpstreamContext) -> PostProcess:
    """``f(args, rollout_data)``, with a dict of lists, one entry per sample; changes to loss masks are applied."""

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
        samples = [
            _apply_loss_mask(s, at, m) for s, at, m in zip(batch.samples, starts, data["loss_masks"], strict=True)
        ]
        return replace(batch, samples=tuple(samples))

    return process


def adapt_rollout_log(function: Callable[..., Any], run: UpstreamContext) -> RolloutLog:
    """``f(rollout_id, args, samples, metrics, seconds) -> bool``: true keeps the run from logging the metrics itself.

    Metrics it adds to the dict are logged too. The seconds are not measured here, and are 0.
    """

    def log(step: int, groups: Sequence[Group], metrics: Mapping[str, float]) -> Mapping[str, float]:
        logged = dict(metrics)
        samples = [sample for group in groups for sample in samples_from_group(run, group)]
        tracked: dict[str, float] = {}
        with collect_logged(tracked):
            is_logged = function(step - 1, run.args, samples, logged, 0.0)
        return tracked if is_logged else {**logged, **tracked}

    return log


def adapt_eval_log(function: Callable[..., Any], run: UpstreamContext) -> EvalLog:
    """``f(rollout_id, args, data, metrics) -> bool``; ``data`` has rewards, truncations and samples of each set."""

    def log(step: int, groups: Mapping[str, Sequence[Group]], metrics: Mapping[str, float]) -> Mapping[str, float]:
        logged = dict(metrics)
        data = {
            name: {
                "rewards": [reward for group in found for reward in group.rewards],
                "truncated": [t.status is Status.TRUNCATED for group in found for t in group.trajectories],
                "samples": [sample for group in found for sample in samples_from_group(run, group)],
            }
            for name, found in groups.items()
        }
        tracked: dict[str, float] = {}
        with collect_logged(tracked):
            is_logged = function(step, run.args, data, logged)
        return tracked if is_logged else {**logged, **tracked}

    return log


def adapt_init(function: Callable[..., Any], run: UpstreamContext) -> Callable[[Any], None]:
    """``f(args)``, called when the model exists."""

    def begin(model: Any) -> None:
        function(run.args)

    return begin


class UpstreamModel:
    """A Megatron model chunk as hooks see it: this rank's shards of the parameters by name."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """The parameters with their names."""
        return iter(self._model.parameters().items())

    def parameters(self) -> Iterator[Any]:
        """The parameters."""
        return iter(self._model.parameters().values())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def adapt_before_log_probs(function: Callable[..., Any], run: UpstreamContext) -> Callable[[int, Any], None]:
    """``f(args, model, store_prefix)``, with a list of one model chunk and an empty prefix."""

    def call(step: int, model: Any) -> None:
        function(run.args, [UpstreamModel(model)], "")

    return call


def adapt_before_train_step(function: Callable[..., Any], run: UpstreamContext) -> Callable[[int, int, Any, Any], None]:
    """``f(args, rollout_id, step_id, model, optimizer, opt_param_scheduler)``; of the last, ``num_steps`` is known."""

    def call(step: int, update: int, model: Any, optimizer: Any) -> None:
        schedule = SimpleNamespace(num_steps=optimizer.updates, optimizer=optimizer)
        function(run.args, step - 1, update, [UpstreamModel(model)], optimizer, schedule)

    return call


def adapt_post_save(function: Callable[..., Any], run: UpstreamContext) -> PostSave:
    """``f(args, rollout_id, checkpoint_dir, hf_checkpoint_dir)``: one folder has both."""

    def call(step: int, folder: Path) -> None:
        function(run.args, step - 1, str(folder), str(folder))

    return call


def adapt_data_buffer(buffer_class: Callable[..., Any], run: UpstreamContext) -> DataBuffer:
    """A class with ``async put(input)`` and ``async get()``: finished groups are put once, and ``get`` chooses.

    A group that it evicts is chosen when there is no other.
    """
    entries: dict[int, tuple[Group, DataBufferInput]] = {}
    evicted: set[int] = set()
    buffers: list[Any] = []

    def evict(prompt_group: list[UpstreamSample]) -> None:
        evicted.update(key for key, (_, entry) in entries.items() if entry.prompt_group is prompt_group)

    async def choose(groups: Sequence[Group], version: int) -> Group:
        if not buffers:
            buffers.append(buffer_class(DataBufferConstructorInput(args=run.args, unused_handler_fn=evict)))
        for group in groups:
            if id(group) not in entries:
                samples = samples_from_group(run, group)
                entry = DataBufferInput(prompt_group=list(samples), group=list(samples), weight_version=version)
                entries[id(group)] = group, entry
                await buffers[0].put(entry)
        left = [group for group in groups if id(group) not in evicted]
        if not left:
            return groups[0]
        found = await asyncio.wait_for(buffers[0].get(), _BUFFER_SECONDS)
        return next((group for group, entry in entries.values() if entry.group is found.group), left[0])

    def take(waiting: Sequence[Group], version: Version) -> int:
        chosen = run_coroutine(choose(waiting, version.number))
        entries.pop(id(chosen), None)
        evicted.discard(id(chosen))
        return next((at for at, group in enumerate(waiting) if group is chosen), 0)

    return take


def adapt_sample_picker(function: Callable[..., Any], run: UpstreamContext) -> Callable[[Sequence[Any]], list[Any]]:
    """``f(leaf_samples, session_metadata) -> samples``: a selection of a session's conversations."""

    def pick(conversations: Sequence[Any]) -> list[Any]:
        samples = [_sample_from_spans(conversation.spans) for conversation in conversations]
        by_sample = {id(sample): each for sample, each in zip(samples, conversations, strict=True)}
        chosen = function(list(samples), {"num_leaves": len(samples)})
        if not all(id(sample) in by_sample for sample in chosen):
            raise HookError(f"{run.source} returned a sample that it was not given; it selects some of them.")
        return [by_sample[id(sample)] for sample in chosen]

    return pick


def adapt_postprocessor(function: Callable[..., Any], run: UpstreamContext) -> Callable[[Trajectory], Trajectory]:
    """``f(leaf_samples, session_metadata) -> samples``: the same samples, whose loss masks and rewards are taken."""

    def process(trajectory: Trajectory) -> Trajectory:
        samples = [_sample_from_spans(branch) for branch in trajectory.branches]
        for sample in samples:
            sample.status, sample.metadata = UpstreamStatus(str(trajectory.status)), dict(trajectory.metadata)
            sample.reward = None if trajectory.reward is None else trajectory.reward.value
        result = list(function(list(samples), {"num_leaves": len(samples)}))
        if [id(sample) for sample in result] != [id(sample) for sample in samples]:
            raise HookError(f"{run.source} returns the samples it was given, in their order.")
        pairs = zip(trajectory.branches, samples, strict=True)
        reward = trajectory.reward
        if samples[-1].reward is not None and (reward is None or samples[-1].reward != reward.value):
            reward = reward_from_upstream(run, samples[-1].reward)
        return replace(
            trajectory,
            branches=tuple(_exclude_tokens(run, branch, sample.loss_mask or []) for branch, sample in pairs),
            reward=reward,
            metadata={**trajectory.metadata, **samples[-1].metadata},
        )

    return process


def _exclude_tokens(run: UpstreamContext, branch: Sequence[Span], mask: Sequence[int]) -> tuple[Span, ...]:
    """The branch, with tokens of the policy that the mask excludes as context."""
    start = sum(len(span) for span in branch) - len(mask)
    kept = np.array([*([0] * max(start, 0)), *mask], bool)
    trained = np.concatenate([span.mask for span in branch])
    if len(kept) != len(trained) or (kept & ~trained).any():
        raise HookError(f"{run.source} gave a loss mask that trains on a new token; it may only exclude tokens.")
    spans: list[Span] = []
    at = 0
    for span in branch:
        keep = kept[at : at + len(span)]
        cuts = [0, *(np.flatnonzero(np.diff(keep)) + 1).tolist(), len(span)]
        at += len(span)
        if span.author is not Author.POLICY or keep.all():
            spans.append(span)
            continue
        spans += [_cut_span(span, a, b, is_trained=bool(keep[a])) for a, b in pairwise(cuts) if b > a]
    return tuple(spans)


def _cut_span(span: Span, start: int, end: int, *, is_trained: bool) -> Span:
    extras = {name: values[start:end] for name, values in span.extras.items()}
    if is_trained:
        assert span.logprobs is not None
        return replace(span, tokens=span.tokens[start:end], logprobs=span.logprobs[start:end], extras=extras)
    context = {name: values for name, values in extras.items() if name not in SAMPLING_FIELDS}
    return Span(author=Author.ENV, tokens=span.tokens[start:end], extras=context)


def _sample_from_spans(spans: Sequence[Span]) -> UpstreamSample:
    start = next((i for i, span in enumerate(spans) if span.author is not Author.PROMPT), len(spans))
    response = spans[start:]
    return UpstreamSample(
        tokens=[int(token) for span in spans for token in span.tokens],
        response_length=sum(map(len, response)),
        loss_mask=[int(span.author is Author.POLICY) for span in response for _ in span.tokens],
        weight_versions=[str(span.version.number) for span in response if span.version is not None],
        status=UpstreamStatus.COMPLETED,
    )


class UpstreamDataSource:
    """A core.protocols.Source over an object with ``get_samples``; a prompt's id is how many came before it.

    Its state is that number: a resumed run reads and skips as many, so the object must return them in the same order.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._count = 0

    def next(self) -> Prompt:
        groups = self._inner.get_samples(1)
        if len(groups) != 1 or not groups[0] or not isinstance(groups[0][0], UpstreamSample):
            raise HookError("get_samples(1) of the data source gives a list of one list of samples, all of one prompt.")
        sample, self._count = groups[0][0], self._count + 1
        return prompt_from_sample(sample, self._count - 1)

    def state(self) -> dict[str, Any]:
        return {"drawn": self._count}

    def load(self, state: Mapping[str, Any]) -> None:
        while self._count < state["drawn"]:
            self.next()


def adapt_data_source(result: Callable[..., Any], run: UpstreamContext) -> DataSource:
    """A class ``C(args)`` with ``get_samples(count)``."""

    def make(prompts: Sequence[Prompt]) -> UpstreamDataSource:
        with provide_prompts(run, prompts):
            inner = result(run.args)
        if not callable(getattr(inner, "get_samples", None)):
            raise HookError(
                f"The data source is a {type(inner).__name__} without get_samples; write it as def "
                "(prompts: Sequence[Prompt]) -> Source."
            )
        return UpstreamDataSource(inner)

    return make


def _samples_with_mask(
    run: UpstreamContext, prompt: Prompt, trajectory: Trajectory, at: int, result: Mapping[str, Any]
) -> list[Sample]:
    samples = run.build_samples(
        prompt.id, trajectory, advantage=float(result["rewards"][at]), trained_author=Author.POLICY
    )
    if len(samples) > 1:
        raise HookError(
            f"Trajectory {trajectory.index} of prompt {prompt.id} has {len(samples)} branches, which upstream's train "
            "data does not support; write the function as def (group: Group) -> Sequence[Sample]."
        )
    (row,) = samples
    tokens, kept = np.asarray(result["tokens"][at]), np.asarray(result["loss_masks"][at], bool)
    if not np.array_equal(tokens, row.tokens) or len(kept) > len(tokens):
        raise HookError(
            f"The converted tokens of trajectory {trajectory.index} of prompt {prompt.id} are not those that were "
            "sampled; log-probs and versions depend on these, so pass them on as they are."
        )
    mask = np.zeros(len(tokens), bool)
    mask[len(tokens) - len(kept) :] = kept
    if (mask & ~row.mask).any():
        raise HookError(
            f"The converted loss mask of trajectory {trajectory.index} of prompt {prompt.id} trains on a token that "
            "the policy did not sample; it may only exclude tokens."
        )
    return [replace(row, mask=mask, advantages=np.where(mask, row.advantages, np.float32(0)))]


def _to_filter_result(answer: Any) -> FilterResult:
    if isinstance(answer, DynamicFilterOutput):
        return FilterResult(keep=bool(answer.keep), reason=answer.reason or ("kept" if answer.keep else "filter"))
    if not isinstance(answer, bool | np.bool_) and callable(getattr(answer, "item", None)):
        answer = bool(answer.item())  # a tensor
    if not isinstance(answer, bool | np.bool_):
        raise HookError(f"The filter gave a {type(answer).__name__}; it gives True, False or a DynamicFilterOutput.")
    return FilterResult(keep=True) if answer else FilterResult(keep=False, reason="filter")


async def _maybe_await(result: Any) -> Any:
    """Await the result of an async function; upstream also accepts plain ones."""
    return await result if inspect.isawaitable(result) else result


def _start(sample: Sample) -> int:
    """Index of the first trained token."""
    return int(np.argmax(sample.mask)) if sample.mask.any() else len(sample)


def _apply_loss_mask(sample: Sample, start: int, loss_mask: Sequence[int]) -> Sample:
    mask = np.zeros(len(sample), bool)
    if len(loss_mask) != len(sample) - start:
        raise HookError(
            f"The post-processed loss mask of a sample has {len(loss_mask)} entries for a response of "
            f"{len(sample) - start}; it keeps its length."
        )
    mask[start:] = np.asarray(loss_mask, bool)
    if (mask & ~sample.mask).any():
        raise HookError("The post-processed loss mask trains on a new token; it may only exclude tokens.")
    return replace(sample, mask=mask)
