"""``miles show``: print trajectories of a run with rewards, advantages and log-probs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np

from miles.config.help import get_terminal_width
from miles.core.errors import DataError, UsageError
from miles.core.image_files import ImageFileError, read_image_info
from miles.core.media import ImageInput
from miles.core.types import Array, Author, Group, Trajectory
from miles.launch.config import ShowOptions
from miles.launch.rules.paths import find_newest_checkpoint
from miles.launch.runtime.run_directory import read_run_config
from miles.models.tokenizer import HfTokenizer, load_tokenizer
from miles.observe.formatting import format_fixed, sparkline
from miles.observe.rollout_reader import StepRollouts
from miles.observe.trajectory_view import escape_control, is_coloured, legend, render_trajectory, summarize_logprobs
from miles.rollout.offline.replay_source import RolloutRecording


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryRecord:
    """A trajectory with its index in the step, its group and its advantages."""

    index: int
    group: Group
    trajectory: Trajectory
    advantages: tuple[Array | None, ...]

    @property
    def reward(self) -> float:
        return 0.0 if self.trajectory.reward is None else self.trajectory.reward.value


def show(run: Path, options: ShowOptions) -> int:
    """Print the selected trajectories."""
    selectors = {"--sample": options.sample is not None, "--best": options.best, "--worst": options.worst}
    if sum(selectors.values()) > 1:
        raise UsageError(f"{' and '.join(f for f, is_set in selectors.items() if is_set)} each select one; keep one.")
    rollouts = _read_rollouts(run, options.step)
    records = list(_list_records(rollouts))
    selected = _select_records(records, options, rollouts)
    tokenizer, colour = load_run_tokenizer(run), is_coloured(options.color, sys.stdout)
    rewards = [record.reward for record in records]
    print(
        f"step {rollouts.step} of {run}: {len(rollouts.groups)} prompts, {len(records)} trajectories, "
        f"reward {format_fixed(float(np.mean(rewards)))}"
    )
    for line in _draw_rewards(rollouts, rewards):
        print(line)
    if colour:
        print(legend())
    for record in selected:
        print(f"\n{_format_header(record, len(records))}")
        describe = partial(_describe_image, run / "media")
        print(render_trajectory(record.trajectory, tokenizer, colour=colour, describe_image=describe))
        for line in _list_details(record, tokenizer):
            print(line)
    return 0


def _describe_image(media: Path, image: ImageInput) -> str:
    """Size, format and file of an image of a run."""
    file = next(iter(media.glob(f"{image.source}.*")), None) if image.source else None
    if file is None:
        return f"not in {media}"
    try:
        info = read_image_info(file.read_bytes())
    except (ImageFileError, OSError) as error:
        return f"{file}, which cannot be read ({error})"
    return f"{info.width} x {info.height} pixels, {info.format}, {file}"


def _draw_rewards(rollouts: StepRollouts, rewards: Sequence[float]) -> Iterator[str]:
    """Every reward of the step in order on one scale, a space between groups, wrapped to the terminal."""
    bars = iter(sparkline(rewards, len(rewards)))
    start = "rewards  "
    line = ""
    for group in rollouts.groups:
        word = "".join(islice(bars, len(group.trajectories)))
        if line and len(line) + len(word) >= get_terminal_width() - len(start):
            yield start + line
            start, line = " " * len(start), ""
        line = f"{line} {word}".lstrip()
    yield start + line


def load_run_tokenizer(run: Path) -> HfTokenizer:
    """The tokenizer of the run's newest checkpoint, or of the one it started from."""
    settings = read_run_config(run).get("models", {})
    folder = find_newest_checkpoint(run) or settings.get("hf_checkpoint")
    if folder is None:
        raise DataError(f"{run / 'config.toml'} names no hf_checkpoint, so it is damaged; restore it from a copy.")
    return load_tokenizer(folder, bool(settings.get("trust_remote_code", False)))


def _read_rollouts(run: Path, step: int | None) -> StepRollouts:
    recording = RolloutRecording(str(run))
    steps = recording.available_steps()
    if not steps:
        raise DataError(f"{run} has no rollouts: it finished no step, or was run with --disable-save-rollouts.")
    if step is not None and step not in steps:
        raise UsageError(f"{run} has no rollouts of step {step}; it has steps {steps[0]} to {steps[-1]}.")
    return recording.read(steps[-1] if step is None else step)


def _list_records(rollouts: StepRollouts) -> Iterator[TrajectoryRecord]:
    index = 0
    for group, group_advantages in zip(rollouts.groups, rollouts.advantages, strict=True):
        for trajectory, advantages in zip(group.trajectories, group_advantages, strict=True):
            yield TrajectoryRecord(index=index, group=group, trajectory=trajectory, advantages=advantages)
            index += 1


def _select_records(
    records: list[TrajectoryRecord], options: ShowOptions, rollouts: StepRollouts
) -> list[TrajectoryRecord]:
    if options.sample is not None and options.sample >= len(records):
        raise UsageError(f"--sample {options.sample}: step {rollouts.step} has trajectories 0 to {len(records) - 1}.")
    best, worst = max(records, key=lambda record: record.reward), min(records, key=lambda record: record.reward)
    if options.sample is not None:
        selected = [records[options.sample]]
    elif options.best or options.worst:
        selected = [best if options.best else worst]
    elif options.group:
        selected = [records[0]]
    else:
        selected = [best] if best is worst else [best, worst]
    if options.group:
        return [record for record in records if record.group is selected[0].group]
    return selected


def _format_header(record: TrajectoryRecord, count: int) -> str:
    trajectory, prompt = record.trajectory, record.group.prompt
    parts = {} if trajectory.reward is None else trajectory.reward.parts
    parts_text = (
        f" ({', '.join(f'{name} {format_fixed(float(part))}' for name, part in parts.items())})" if parts else ""
    )
    unscored = trajectory.metadata.get("unscored")
    versions = {span.version for span in trajectory.spans if span.version is not None}
    several = len({version.policy for version in versions}) > 1
    names = sorted((version.policy if several else "", version.number) for version in versions)
    versions_text = (
        f"versions {', '.join(f'{name} {number}'.strip() for name, number in names)}" if len(names) > 1 else ""
    )
    label = None if prompt.label is None else f"label {escape_control(prompt.label)!r}"
    facts = [
        f"reward {format_fixed(record.reward)}{parts_text}" if unscored is None else f"unscored: {unscored}",
        f"advantage {_format_advantage(record)}",
        str(trajectory.status),
        f"{trajectory.response_length} tokens",
        versions_text,
        label,
    ]
    place = (
        f"trajectory {record.index} of {count}: prompt {prompt.id} (epoch {prompt.epoch}), sample {trajectory.index}"
    )
    return f"{place}\n" + "; ".join(fact for fact in facts if fact)


def _format_advantage(record: TrajectoryRecord) -> str:
    """The advantages of the policy's tokens; one number if all are the same."""
    found = [
        advantages[mask]
        for branch, advantages in zip(record.trajectory.branches, record.advantages, strict=True)
        if advantages is not None
        and (mask := np.repeat([s.author is Author.POLICY for s in branch], [len(s) for s in branch])).any()
    ]
    if not found:
        return "none"
    low, high = (float(bound(np.concatenate(found))) for bound in (np.min, np.max))
    return format_fixed(low) if low == high else f"{format_fixed(low)} to {format_fixed(high)}"


def _list_details(record: TrajectoryRecord, tokenizer: HfTokenizer) -> Iterator[str]:
    """Other details, one per line."""
    if line := summarize_logprobs(record.trajectory, tokenizer):
        yield line
    metadata = record.trajectory.metadata
    turns = {name: metadata[name] for name in ("turns", "tool_calls", "tool_failures") if name in metadata}
    if turns:
        yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in turns.items())
    for name in ("reason", "failure", "session_mismatch"):
        if metadata.get(name):
            yield f"{name.replace('_', ' ')}: {escape_control(str(metadata[name]))}"
