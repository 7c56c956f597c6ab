"""Conversion between our types and upstream's sample.

The way back uses the engine's spans: each trained part of a response must be tokens the engine returned, after exactly
the tokens it was given. So no text is tokenized twice, and every token keeps its log-prob, version and routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from miles.core import types
from miles.core.errors import HookError, TrajectoryError
from miles.core.protocols import Completion
from miles.core.types import Author, Group, Prompt, Reward, Span, Tokens, Trajectory
from miles.hooks.compat.engine import TrajectoryRequests
from miles.hooks.compat.types import UpstreamContext, UpstreamSample, UpstreamStatus


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
    sample.reward = _upstream_reward(run, trajectory.reward)
    sample.metadata |= {name: value for name, value in trajectory.metadata.items() if name != "text"}
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
        raise HookError(f"The generate function gave no sample for prompt {prompt.id}; return the one it was given.")
    last = samples[-1]
    if last.status is UpstreamStatus.PENDING:
        raise HookError(
            f"The sample of prompt {prompt.id} is still pending; the generate function must set its status."
        )
    rewards = [reward_from_upstream(run, sample.reward) for sample in samples if sample.reward is not None]
    if any(reward != rewards[0] for reward in rewards):
        raise HookError(f"The samples of one trajectory of prompt {prompt.id} differ in reward; they share one.")
    return Trajectory(
        branches=tuple(_build_branch(run, prompt, trajectory_requests, sample) for sample in samples),
        status=types.Status(last.status.value),
        reward=rewards[0] if rewards else None,
        metadata={**last.metadata, "text": last.response},
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


def _upstream_reward(run: UpstreamContext, reward: Reward | None) -> float | dict[str, Any] | None:
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
            f"The sample of prompt {prompt.id} has {len(tokens)} tokens, a response_length of {length} and a loss_mask "
            f"of {len(mask)}; tokens are the prompt's and the response's, and the mask is of the response."
        )
    start = len(tokens) - length
    spans, unused = [Span(author=Author.PROMPT, tokens=tokens[:start])], list(trajectory_requests.asked)
    for trained, places in groupby(range(start, len(tokens)), key=lambda at: bool(mask[at - start])):
        positions = list(places)
        at, end = positions[0], positions[-1] + 1
        if not trained:
            spans.append(Span(author=Author.ENV, tokens=tokens[at:end]))
            continue
        while at < end:
            completion = _find_completion(prompt, tokens, at, end, unused)
            spans_taken = _take_tokens(completion.spans, end - at)
            spans = [*run.fill_extras(spans, completion.prompt_extras), *spans_taken]
            at += sum(map(len, spans_taken))
    return tuple(spans)


def _prompt_branch(run: UpstreamContext, prompt: Prompt) -> tuple[Span, ...]:
    return (Span(author=Author.PROMPT, tokens=np.array(run.render(prompt), np.int32)),)


def _find_completion(
    prompt: Prompt, tokens: Tokens, at: int, end: int, unused: list[tuple[Tokens, Completion]]
) -> Completion:
    """Find the completion that starts at ``at`` among the requests not used yet; earlier ones were discarded."""
    for number, (result, completion) in enumerate(unused):
        ids = [int(token) for span in completion.spans for token in span.tokens]
        size = min(len(ids), end - at)
        if size and np.array_equal(result, tokens[:at]) and np.array_equal(ids[:size], tokens[at : at + size]):
            del unused[: number + 1]
            return completion
    raise TrajectoryError(
        f"Token {at} of a sample of prompt {prompt.id} is to be trained on, and no request to the engine was answered "
        "with it after exactly the tokens before it; pass the engine's output_ids on as they are, ask it with "
        "input_ids, and give loss_mask 0 to what it did not write."
    )


def _take_tokens(spans: Sequence[Span], count: int) -> list[Span]:
    spans_taken: list[Span] = []
    for span in (span for span in spans if len(span)):
        if count <= 0:
            break
        spans_taken.append(span.truncate(min(count, len(span))))
        count -= len(span)
    return spans_taken
