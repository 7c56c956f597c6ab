"""Our nouns as upstream's sample, and a sample as our nouns again.

The way back goes by what the engine wrote: each stretch of a response that is to be trained on must be tokens the
engine gave, after exactly the tokens it was given. So no text is tokenised twice, and every token keeps its log-prob,
its version and its routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from miles.core import types
from miles.core.errors import PlugError
from miles.core.protocols import Completion
from miles.core.types import Author, Group, Prompt, Reward, Span, Tokens, Trajectory
from miles.plug.upstream.engine import Attempt
from miles.plug.upstream.run import Run
from miles.plug.upstream.sample import Sample, Status


def blank(run: Run, prompt: Prompt) -> Sample:
    """A prompt that waits to be attempted."""
    return Sample(
        group_index=prompt.id,
        index=prompt.id * run.args.n_samples_per_prompt,
        prompt=run.shown(prompt),
        label=prompt.label,
        metadata=dict(prompt.metadata),
    )


def sample_of(run: Run, prompt: Prompt, trajectory: Trajectory) -> Sample:
    """An attempt, of which the last branch is shown."""
    branch = trajectory.branches[-1]
    start = next((i for i, span in enumerate(branch) if span.author is not Author.PROMPT), len(branch))
    written = branch[start:]
    sample = blank(run, prompt)
    assert sample.index is not None
    sample.index += trajectory.index
    sample.tokens = [int(token) for span in branch for token in span.tokens]
    sample.response = str(trajectory.metadata.get("text", ""))
    sample.response_length = sum(map(len, written))
    sample.loss_mask = [int(span.author is Author.POLICY) for span in written for _ in span.tokens]
    sample.rollout_log_probs = [p for span in written for p in _logprobs(span)]
    sample.weight_versions = [str(span.version.number) for span in written if span.version is not None]
    sample.status = Status(str(trajectory.status))
    sample.reward = _shown_reward(run, trajectory.reward)
    sample.metadata |= {name: value for name, value in trajectory.metadata.items() if name != "text"}
    return sample


def samples_of(run: Run, group: Group) -> list[Sample]:
    """Every attempt of a group, in their order."""
    return [sample_of(run, group.prompt, trajectory) for trajectory in group.trajectories]


def trajectory_of(run: Run, prompt: Prompt, attempt: Attempt, given: Sample | Sequence[Sample]) -> Trajectory:
    """What a generate function made of a prompt; several samples are branches of one attempt."""
    samples = [given] if isinstance(given, Sample) else list(given)
    if not samples or not all(isinstance(sample, Sample) for sample in samples):
        raise PlugError(f"The generate function gave no sample for prompt {prompt.id}; return the one it was given.")
    last = samples[-1]
    if last.status is Status.PENDING:
        raise PlugError(
            f"The sample of prompt {prompt.id} is still pending; the generate function must set its status."
        )
    rewards = [reward_of(run, sample.reward) for sample in samples if sample.reward is not None]
    if any(reward != rewards[0] for reward in rewards):
        raise PlugError(f"The samples of one attempt at prompt {prompt.id} differ in reward; they share one.")
    return Trajectory(
        branches=tuple(_branch(run, prompt, attempt, sample) for sample in samples),
        status=types.Status(last.status.value),
        reward=rewards[0] if rewards else None,
        metadata={**last.metadata, "text": last.response},
    )


def reward_of(run: Run, given: Any) -> Reward:
    """What a reward function gave: a number, or several by name of which ``--reward-key`` is trained on."""
    if isinstance(given, Reward):
        return given
    if isinstance(given, dict):
        key, parts = run.args.reward_key, {n: float(v) for n, v in given.items() if _is_number(v)}
        if key not in parts:
            raise PlugError(
                f"The reward is several numbers ({', '.join(given)}) and --reward-key is {key}; name one of them there."
            )
        return Reward(value=parts[key], parts=parts)
    if not _is_number(given):
        raise PlugError(f"The reward is a {type(given).__name__}; a reward function gives a number, or a dict of them.")
    return Reward(value=float(given))


def _shown_reward(run: Run, reward: Reward | None) -> float | dict[str, Any] | None:
    if reward is None:
        return None
    return dict(reward.parts) if run.args.reward_key else reward.value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number | np.bool_)


def _logprobs(span: Span) -> list[float]:
    return [0.0] * len(span) if span.logprobs is None else [float(p) for p in span.logprobs]


# -- back to spans --------------------------------------------------------------------------


def _branch(run: Run, prompt: Prompt, attempt: Attempt, sample: Sample) -> tuple[Span, ...]:
    """The spans of a sample: the prompt's, then by turns what the engine and what others wrote."""
    if not sample.tokens and sample.status in (Status.ABORTED, Status.FAILED):
        return (Span(author=Author.PROMPT, tokens=np.array(run.render(prompt), np.int32)),)
    tokens, length = np.array(sample.tokens, np.int32), sample.response_length
    mask = [1] * length if sample.loss_mask is None else list(sample.loss_mask)
    if not 0 <= length < len(tokens) or len(mask) != length:
        raise PlugError(
            f"The sample of prompt {prompt.id} has {len(tokens)} tokens, a response_length of {length} and a loss_mask "
            f"of {len(mask)}; tokens are the prompt's and the response's, and the mask is of the response."
        )
    start = len(tokens) - length
    spans, waiting = [Span(author=Author.PROMPT, tokens=tokens[:start])], list(attempt.asked)
    for trained, places in groupby(range(start, len(tokens)), key=lambda at: bool(mask[at - start])):
        stretch = list(places)
        at, end = stretch[0], stretch[-1] + 1
        if not trained:
            spans.append(Span(author=Author.ENV, tokens=tokens[at:end]))
            continue
        while at < end:
            completion = _answer(prompt, tokens, at, end, waiting)
            taken = _first(completion.spans, end - at)
            spans = [*run.stamp(spans, completion.given), *taken]
            at += sum(map(len, taken))
    return tuple(spans)


def _answer(prompt: Prompt, tokens: Tokens, at: int, end: int, waiting: list[tuple[Tokens, Completion]]) -> Completion:
    """What the engine wrote from ``at`` on, of the requests not yet accounted for; those before it came to nothing."""
    for number, (given, completion) in enumerate(waiting):
        ids = [int(token) for span in completion.spans for token in span.tokens]
        size = min(len(ids), end - at)
        if size and np.array_equal(given, tokens[:at]) and np.array_equal(ids[:size], tokens[at : at + size]):
            del waiting[: number + 1]
            return completion
    raise PlugError(
        f"Token {at} of a sample of prompt {prompt.id} is to be trained on, and no request to the engine was answered "
        "with it after exactly the tokens before it; pass the engine's output_ids on as they are, ask it with "
        "input_ids, and give loss_mask 0 to what it did not write."
    )


def _first(spans: Sequence[Span], count: int) -> list[Span]:
    taken: list[Span] = []
    for span in (span for span in spans if len(span)):
        if count <= 0:
            break
        taken.append(span.cut(min(count, len(span))))
        count -= len(span)
    return taken
