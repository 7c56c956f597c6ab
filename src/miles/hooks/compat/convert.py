"""Conversion between our types and upstream's sample.

The way back uses the engine's spans: each trained part of a response must be tokens the engine returned, after exactly
the tokens it was given. So no text is tokenized twice, and every token keeps its log-prob, version and routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

import numpy as np

from miles.core import types
from miles.core.errors import HookError, TrajectoryError
from miles.core.types import DEMONSTRATION, Author, Group, Prompt, Reward, Span, Trajectory
from miles.hooks.compat.engine import TrajectoryRequests
from miles.hooks.compat.types import UpstreamContext, UpstreamSample, UpstreamStatus

SAMPLE_FIELDS = "sample_fields"
"""Metadata key of a trajectory: attributes of its sample that only upstream's functions know."""
REMOVED = "remove_sample"
"""Its field that excludes a trajectory from the loss."""
_KEPT_FIELDS = (
    REMOVED,
    "prompt",
    "label",
    "train_metadata",
    "session_id",
    "generate_function_path",
    "non_generation_time",
)
_SAMPLE_NAMES = {each.name for each in fields(UpstreamSample)}


def _collect_fields(samples: Sequence[UpstreamSample], pending: UpstreamSample) -> dict[str, Any]:
    """What later functions may read of a sample and our types have no place for; plain values only."""
    found = {n: v for n, v in vars(samples[-1]).items() if n in _KEPT_FIELDS or n not in _SAMPLE_NAMES}
    default = vars(pending)
    kept = {n: v for n, v in found.items() if v != default.get(n) and _is_plain(v)}
    if any(sample.remove_sample for sample in samples):
        kept[REMOVED] = True
    return {SAMPLE_FIELDS: kept} if kept else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return value is None or isinstance(value, str | int | float | bool)


def is_removed(trajectory: Trajectory) -> bool:
    """Whether its sample was excluded from the loss."""
    return bool(trajectory.metadata.get(SAMPLE_FIELDS, {}).get(REMOVED))


def trajectory_to_score(run: UpstreamContext, prompt: Prompt, sample: UpstreamSample) -> Trajectory:
    """A trajectory for a reward function alone: the response as it is, without the engine's log-probs."""
    start = len(sample.tokens) - sample.response_length
    tokens = np.array(sample.tokens, np.int32)
    spans = [Span(author=Author.PROMPT, tokens=tokens[:start])]
    if sample.response_length:
        logprobs = np.zeros(sample.response_length, np.float32)
        spans.append(Span(author=Author.POLICY, tokens=tokens[start:], logprobs=logprobs, version=DEMONSTRATION))
    status = UpstreamStatus.COMPLETED if sample.status is UpstreamStatus.PENDING else sample.status
    metadata = {**sample.metadata, "text": sample.response, **_collect_fields([sample], sample)}
    index = (sample.index or 0) % run.args.n_samples_per_prompt
    return Trajectory(branches=(tuple(spans),), status=types.Status(status.value), index=index, metadata=metadata)


def prompt_from_sample(sample: UpstreamSample, prompt_id: int = 0) -> Prompt:
    """The prompt that a sample shows."""
    text = sample.prompt
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
    return Prompt(id=prompt_id, messages=messages, label=sample.label, metadata=dict(sample.metadata))


def build_pending_sample(run: UpstreamContext, prompt: Prompt) -> UpstreamSample:
    """A sample for a prompt without a response yet."""
    return UpstreamSample(
        group_index=prompt.id,
        index=prompt.id * run.args.n_samples_per_prompt,
        prompt=run.prompt_text(prompt),
        label=prompt.label,
        metadata=dict(prompt.metadata),
    )


def sample_from_trajectory(run: UpstreamContext, prompt: Prompt, trajectory: Trajectory) -> UpstreamSample:
    """Convert a trajectory to a sample, which shows its last branch."""
    branch = trajectory.branches[-1]
    start = next((i for i, span in enumerate(branch) if span.author is not Author.PROMPT), len(branch))
    response = branch[start:]
    sample = build_pending_sample(run, prompt)
    assert sample.index is not None
    sample.index += trajectory.index
    sample.tokens = [int(token) for span in branch for token in span.tokens]
    sample.response = str(trajectory.metadata.get("text", ""))
    sample.response_length = sum(map(len, response))
    sample.loss_mask = [int(span.author is Author.POLICY) for span in response for _ in span.tokens]
    sample.rollout_log_probs = [p for span in response for p in _logprobs(span)]
    sample.weight_versions = [str(span.version.number) for span in response if span.version is not None]
    sample.status = UpstreamStatus(str(trajectory.status))
    sample.reward = upstream_reward(run, trajectory.reward)
    sample.metadata |= {n: v for n, v in trajectory.metadata.items() if n not in ("text", SAMPLE_FIELDS)}
    vars(sample).update(trajectory.metadata.get(SAMPLE_FIELDS, {}))
    return sample


def samples_from_group(run: UpstreamContext, group: Group) -> list[UpstreamSample]:
    """Convert every trajectory of a group, in order."""
    return [sample_from_trajectory(run, group.prompt, trajectory) for trajectory in group.trajectories]


def trajectory_from_samples(
    run: UpstreamContext,
    prompt: Prompt,
    trajectory_requests: TrajectoryRequests,
    result: UpstreamSample | Sequence[UpstreamSample],
) -> Trajectory:
    """Convert a generate function's samples to a trajectory; several samples are its branches."""
    samples = [result] if isinstance(result, UpstreamSample) else list(result)
    if not samples or not all(isinstance(sample, UpstreamSample) for sample in samples):
        raise HookError(f"{run.source} gave no sample for prompt {prompt.id}; return the one it was given.")
    last = samples[-1]
    if last.status is UpstreamStatus.PENDING:
        raise HookError(
            f"{run.source}: the sample of prompt {prompt.id} is still pending; the function must set its status."
        )
    rewards = [reward_from_upstream(run, sample.reward) for sample in samples if sample.reward is not None]
    if any(reward != rewards[0] for reward in rewards):
        raise HookError(
            f"{run.source}: the samples of one trajectory of prompt {prompt.id} differ in reward; they share one."
        )
    return Trajectory(
        branches=tuple(_build_branch(run, prompt, trajectory_requests, sample) for sample in samples),
        status=types.Status(last.status.value),
        reward=rewards[0] if rewards else None,
        metadata={
            **last.metadata,
            "text": last.response,
            **_collect_fields(samples, build_pending_sample(run, prompt)),
        },
    )


def build_failed_trajectory(run: UpstreamContext, prompt: Prompt, failure: str) -> Trajectory:
    """A trajectory of the prompt alone, which is not trained on."""
    metadata = {"text": "", "failure": failure}
    return Trajectory(branches=(_prompt_branch(run, prompt),), status=types.Status.FAILED, metadata=metadata)


def reward_from_upstream(run: UpstreamContext, result: Any) -> Reward:
    """Convert a reward function's result: a number, or several by name of which ``--reward-key`` is trained on."""
    if isinstance(result, Reward):
        return result
    if isinstance(result, dict):
        key, parts = run.args.reward_key, {n: v for n, v in result.items() if _is_number(v)}
        if key not in parts:
            raise HookError(
                f"The reward is several numbers ({', '.join(result)}) and --reward-key is {key}; name one of them "
                f"there."
            )
        return Reward(value=parts[key], parts=parts)
    if not _is_number(result):
        raise HookError(
            f"The reward is a {type(result).__name__}; a reward function gives a number, or a dict of them."
        )
    return Reward(value=result)


def upstream_reward(run: UpstreamContext, reward: Reward | None) -> float | dict[str, Any] | None:
    """A reward as upstream's samples have it: a number, or its parts where --reward-key names one of them."""
    if reward is None:
        return None
    return dict(reward.parts) if run.args.reward_key else reward.value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _logprobs(span: Span) -> list[float]:
    return [0.0] * len(span) if span.logprobs is None else [float(p) for p in span.logprobs]


# -- back to spans --------------------------------------------------------------------------


def _build_branch(
    run: UpstreamContext, prompt: Prompt, trajectory_requests: TrajectoryRequests, sample: UpstreamSample
) -> tuple[Span, ...]:
    """Build the spans of a sample: the prompt's, then alternating engine and environment spans."""
    if not sample.tokens and sample.status in (UpstreamStatus.ABORTED, UpstreamStatus.FAILED):
        return _prompt_branch(run, prompt)
    tokens, length = np.array(sample.tokens, np.int32), sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if not 0 <= length < len(tokens) or len(mask) != length:
        raise HookError(
            f"{run.source}: the sample of prompt {prompt.id} has {len(tokens)} tokens, a response_length of {length} "
            f"and a loss_mask of {len(mask)}; tokens are the prompt's and the response's, and the mask is of the "
            "response."
        )
    if sample.rollout_log_probs is not None and len(sample.rollout_log_probs) != length:
        raise HookError(
            f"{run.source}: the sample of prompt {prompt.id} has a response_length of {length} and "
            f"{len(sample.rollout_log_probs)} rollout_log_probs; give one for each token of the response, or none."
        )
    start = len(tokens) - length
    spans, lookup = [Span(author=Author.PROMPT, tokens=tokens[:start])], trajectory_requests.open_lookup()
    for trained, places in groupby(range(start, len(tokens)), key=lambda at: bool(mask[at - start])):
        positions = list(places)
        at, end = positions[0], positions[-1] + 1
        if not trained:
            spans.append(Span(author=Author.ENV, tokens=tokens[at:end]))
            continue
        while at < end:
            completion = lookup.find(tokens[:at], tokens[at:end])
            if completion is None:
                raise TrajectoryError(
                    f"Token {at} of a sample of prompt {prompt.id} is to be trained on, and no request to the engine "
                    "was answered with it after exactly the tokens before it; pass the engine's output_ids on as they "
                    "are, ask it with input_ids, and give loss_mask 0 to what it did not write."
                )
            spans_taken = _take_tokens(completion.spans, end - at)
            spans = [*run.fill_extras(spans, completion.prompt_extras), *spans_taken]
            at += sum(map(len, spans_taken))
    return tuple(spans)


def _prompt_branch(run: UpstreamContext, prompt: Prompt) -> tuple[Span, ...]:
    return (Span(author=Author.PROMPT, tokens=np.array(run.render(prompt), np.int32)),)


def _take_tokens(spans: Sequence[Span], count: int) -> list[Span]:
    spans_taken: list[Span] = []
    for span in (span for span in spans if len(span)):
        if count <= 0:
            break
        spans_taken.append(span.truncate(min(count, len(span))))
        count -= len(span)
    return spans_taken
