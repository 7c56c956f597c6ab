"""Example events: a small run as the loop emits it, with real types."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from miles.core.events import (
    BatchTaken,
    Evaluated,
    Event,
    GroupFinished,
    Progress,
    PromptAdmitted,
    RunEnded,
    RunStarted,
    Saved,
    StepFinished,
)
from miles.core.types import Author, Batch, Group, Prompt, Reward, Sample, Span, Status, Trajectory, Version


def span(author: Author, tokens: list[int], version: int = 0) -> Span:
    ids = np.array(tokens, np.int32)
    if author is not Author.POLICY:
        return Span(author=author, tokens=ids)
    logprobs = np.array([-(n + 1) / 7 for n in range(len(tokens))], np.float32)
    return Span(author=author, tokens=ids, logprobs=logprobs, version=Version(number=version))


def trajectory(index: int, reward: float | None, *, length: int = 3, version: int = 0, **more) -> Trajectory:
    status = more.pop("status", Status.COMPLETED)
    branch = (span(Author.PROMPT, [1, 2]), span(Author.POLICY, list(range(5, 5 + length)), version))
    return Trajectory(
        branches=more.pop("branches", (branch,)),
        status=status,
        reward=None if reward is None else Reward(value=reward, parts={"right": reward}),
        index=index,
        metadata=more,
    )


def group(prompt_id: int, rewards: list[float], **more) -> Group:
    tries = tuple(trajectory(i, reward, **more) for i, reward in enumerate(rewards))
    return Group(prompt=Prompt(id=prompt_id, messages=[], label="42"), trajectories=tries)


def samples(one: Group) -> list[Sample]:
    rows = []
    for t in one.trajectories:
        for branch in t.branches:
            tokens = np.concatenate([s.tokens for s in branch])
            mask = np.concatenate([s.mask for s in branch])
            versions = np.concatenate([np.full(len(s), -1 if s.version is None else s.version.number) for s in branch])
            rows.append(
                Sample(
                    prompt_id=one.prompt.id,
                    trajectory=t.index,
                    tokens=tokens,
                    mask=mask,
                    logprobs=np.where(mask, np.float32(-0.5), np.float32(0)),
                    advantages=np.where(mask, np.float32(t.index - 0.5), np.float32(0)),
                    versions=versions.astype(np.int32),
                    samples_per_trajectory=len(t.branches),
                )
            )
    return rows


def taken(step: int, groups: list[Group]) -> BatchTaken:
    rows = tuple(row for one in groups for row in samples(one))
    batch = Batch(step=step, samples=rows, num_groups=len(groups))
    tickets = tuple(range(step * len(groups), (step + 1) * len(groups)))
    return BatchTaken(step=step, tickets=tickets, batch=batch, groups=tuple(groups))


def finished(step: int, *, reward: float = 0.5, **metrics: float) -> StepFinished:
    known = {"reward": reward, "train_tokens": 900.0, "rollout_tokens": 600.0, "staleness": 0.0}
    return StepFinished(
        step=step,
        version=Version(number=step),
        metrics=known | {"parity_mean_abs": 1e-7, "kl": 0.01, "entropy": 1.25, "lr": 1e-3} | metrics,
        seconds={"rollout": 0.5, "train": 0.25, "publish": 0.01, "step": 1.0},
    )


def evaluated(step: int, reward: float) -> Evaluated:
    return Evaluated(step=step, metrics={"eval/easy/reward": reward}, seconds={"evaluate": 0.5})


@lru_cache
def story(steps: int, *, first: int = 1, salt: float = 0.0, save_every: int = 2) -> tuple[Event, ...]:
    """The events of steps ``first`` to ``steps``, the same at every telling; ``salt`` shifts the rewards."""
    events: list[Event] = [RunStarted(step=first - 1, steps=steps)]
    if first == 1:
        events.append(evaluated(0, 0.125))
    elif (first - 1) % save_every == 0:  # a continued run says again what its checkpoint could not yet record
        events += [Saved(step=first - 1, name=f"step-{first - 1:06d}"), evaluated(first - 1, 0.1 * (first - 1))]
    for step in range(first, steps + 1):
        groups = [group(10 * step + n, [0.1 * step + salt, 0.3 * n], version=step - 1) for n in range(2)]
        for n, one in enumerate(groups):
            ticket = 2 * step + n
            events.append(PromptAdmitted(ticket=ticket, prompt_id=one.prompt.id, epoch=0))
            events.append(Progress(step=step, done=n, total=2))
            events.append(GroupFinished(ticket=ticket, kept=True, reason="kept", group=one, seconds={"wait": 0.1}))
        events += [taken(step, groups), finished(step, reward=0.1 * step + salt, odd=float("inf"))]
        if step % save_every == 0:
            events += [Saved(step=step, name=f"step-{step:06d}"), evaluated(step, 0.1 * step)]
    return (*events, RunEnded(step=steps, finished=True))
