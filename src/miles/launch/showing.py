"""``miles show``: trajectories of a run in the terminal, with what each earned and how likely each token was."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from miles.core.errors import DataError, UsageError
from miles.core.types import Array, Author, Group, Trajectory
from miles.launch.config import ShowOptions
from miles.launch.found import newest_checkpoint
from miles.models.tokenizer import HubTokenizer, load_tokenizer
from miles.observe.painted import harmless, is_coloured, legend, painted, summed
from miles.observe.reread import Taken
from miles.observe.text import fixed, sparkline
from miles.rollout.recorded import Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A trajectory with its number in its step, its group, and what its tokens were credited with."""

    number: int
    group: Group
    trajectory: Trajectory
    advantages: tuple[Array | None, ...]

    @property
    def reward(self) -> float:
        return 0.0 if self.trajectory.reward is None else self.trajectory.reward.value


def show(run: Path, options: ShowOptions) -> int:
    """Print what was asked for."""
    chosen = {"--sample": options.sample is not None, "--best": options.best, "--worst": options.worst}
    if sum(chosen.values()) > 1:
        raise UsageError(f"{' and '.join(f for f, given in chosen.items() if given)} each choose one; keep one.")
    taken = _taken(run, options.step)
    every = list(_every(taken))
    wanted = _wanted(every, options, taken)
    tokenizer, colour = tokenizer_of(run), is_coloured(options.color, sys.stdout)
    rewards = [each.reward for each in every]
    print(
        f"step {taken.step} of {run}: {len(taken.groups)} prompts, {len(every)} trajectories, "
        f"reward {fixed(float(np.mean(rewards)))}  {sparkline(sorted(rewards), 24)}"
    )
    if colour:
        print(legend())
    for each in wanted:
        print(f"\n{_head(each, len(every))}")
        print(painted(each.trajectory, tokenizer, colour=colour))
        for line in _foot(each, tokenizer):
            print(line)
    return 0


def tokenizer_of(run: Path) -> HubTokenizer:
    """That of the run's newest checkpoint, or where it has none, of what it started from."""
    settings = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["models"]
    folder = newest_checkpoint(run) or Path(settings["hf_checkpoint"])
    return load_tokenizer(folder, settings["trust_remote_code"])


def _taken(run: Path, step: int | None) -> Taken:
    recording = Recording(str(run))
    there = recording.there()
    if not there:
        raise DataError(f"{run} has no rollouts: it made no step, or was run with --disable-save-rollouts.")
    if step is not None and step not in there:
        raise UsageError(f"{run} has no rollouts of step {step}; there are steps {there[0]} to {there[-1]}.")
    return recording.read(there[-1] if step is None else step)


def _every(taken: Taken) -> Iterator[Shown]:
    number = 0
    for group, credited in zip(taken.groups, taken.advantages, strict=True):
        for trajectory, advantages in zip(group.trajectories, credited, strict=True):
            yield Shown(number=number, group=group, trajectory=trajectory, advantages=advantages)
            number += 1


def _wanted(every: list[Shown], options: ShowOptions, taken: Taken) -> list[Shown]:
    if options.sample is not None and options.sample >= len(every):
        raise UsageError(f"--sample {options.sample}: step {taken.step} has trajectories 0 to {len(every) - 1}.")
    best, worst = max(every, key=lambda each: each.reward), min(every, key=lambda each: each.reward)
    if options.sample is not None:
        chosen = [every[options.sample]]
    elif options.best or options.worst:
        chosen = [best if options.best else worst]
    elif options.group:
        chosen = [every[0]]
    else:
        chosen = [best] if best is worst else [best, worst]
    return [each for each in every if each.group is chosen[0].group] if options.group else chosen


def _head(shown: Shown, count: int) -> str:
    trajectory, prompt = shown.trajectory, shown.group.prompt
    parts = {} if trajectory.reward is None else trajectory.reward.parts
    told = f" ({', '.join(f'{name} {fixed(float(part))}' for name, part in parts.items())})" if parts else ""
    unscored = trajectory.metadata.get("unscored")
    versions = {span.version for span in trajectory.spans if span.version is not None}
    several = len({version.policy for version in versions}) > 1
    told_of = sorted((version.policy if several else "", version.number) for version in versions)
    written = (
        f"versions {', '.join(f'{name} {number}'.strip() for name, number in told_of)}" if len(told_of) > 1 else ""
    )
    label = None if prompt.label is None else f"label {harmless(prompt.label)!r}"
    facts = [
        f"reward {fixed(shown.reward)}{told}" if unscored is None else f"unscored: {unscored}",
        f"advantage {_advantage(shown)}",
        str(trajectory.status),
        f"{trajectory.response_length} tokens",
        written,
        label,
    ]
    place = (
        f"trajectory {shown.number} of {count}: prompt {prompt.id} (epoch {prompt.epoch}), attempt {trajectory.index}"
    )
    return f"{place}\n" + "; ".join(fact for fact in facts if fact)


def _advantage(shown: Shown) -> str:
    """What the policy's tokens were credited with; one number where it is the same for all."""
    found = [
        advantages[mask]
        for branch, advantages in zip(shown.trajectory.branches, shown.advantages, strict=True)
        if advantages is not None
        and (mask := np.repeat([s.author is Author.POLICY for s in branch], [len(s) for s in branch])).any()
    ]
    if not found:
        return "none"
    low, high = (float(bound(np.concatenate(found))) for bound in (np.min, np.max))
    return fixed(low) if low == high else f"{fixed(low)} to {fixed(high)}"


def _foot(shown: Shown, tokenizer: HubTokenizer) -> Iterator[str]:
    """What else is known of it, a line each."""
    if line := summed(shown.trajectory, tokenizer):
        yield line
    metadata = shown.trajectory.metadata
    turns = {name: metadata[name] for name in ("turns", "tool_calls", "tool_failures") if name in metadata}
    if turns:
        yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in turns.items())
    for name in ("reason", "failure", "session_mismatch"):
        if metadata.get(name):
            yield f"{name.replace('_', ' ')}: {harmless(str(metadata[name]))}"
