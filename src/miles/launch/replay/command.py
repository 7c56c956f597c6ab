"""``miles replay``: repeat a step of a run from the checkpoint before it, and compare it with what was recorded.

    checkpoint ──> steps between, trained on their rollouts ──> the step: sampled again and compared,
                                                                trained on its rollouts, metrics and weights compared

Training always uses the recorded rollouts, so a difference in sampling causes none in training.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from miles.core.errors import DataError, UsageError
from miles.core.media import ImageInput
from miles.core.types import Trajectory
from miles.kernels.numerics import configure_cublas
from miles.launch.build.debug import get_image_loader
from miles.launch.build.run import build_run
from miles.launch.commands.train import reset_prompt_cursor, resolve_load
from miles.launch.config import Config, ReplayOptions
from miles.launch.plan.plan import build_plan
from miles.launch.replay.compare_rollout import (
    ReplayDone,
    ReplayJournal,
    RolloutComparison,
    read_history,
    read_sessions,
)
from miles.launch.replay.findings import Findings, compare_checkpoints, compare_metrics
from miles.models.processor import load_processor
from miles.models.tokenizer import HfTokenizer
from miles.observe.formatting import format_number
from miles.observe.log_reader import read_rows
from miles.observe.start_timer import StartTimer
from miles.observe.trajectory_view import is_coloured, legend, render_trajectory
from miles.rollout.offline.replay_source import RolloutRecording
from miles.schedule.checkpoints import CheckpointDirectory, CheckpointDraft, Cursor, checkpoint_name, read_cursor


class TemporaryCheckpoints(CheckpointDirectory):
    """Checkpoints in a temporary folder, or none unless it ``writes``."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        super().__init__(folder)
        self._folder = folder
        self._writes = writes

    async def begin(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> CheckpointDraft:
        if self._writes:
            return await super().begin(cursor, write)
        return CheckpointDraft(self._folder, checkpoint_name(cursor.step), cursor)

    def finish(self, draft: CheckpointDraft) -> str:
        return super().finish(draft) if self._writes else draft.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTask:
    """The step to replay, where to start, and whether its sampling can be repeated."""

    run: Path
    step: int
    start: tuple[Path, Cursor] | None
    config: Config
    samples: bool
    options: ReplayOptions

    @property
    def start_step(self) -> int:
        """Steps before the start."""
        return 0 if self.start is None else self.start[1].step


def replay(config: Config, run: Path, step: int, options: ReplayOptions) -> int:
    """Replay a step and print the result; 0 if all is equal, else 1."""
    configure_cublas(config.models.numerics)
    task = _build_task(config, run, step, options)
    print(_describe_task(task), flush=True)
    with tempfile.TemporaryDirectory(prefix="miles-replay-") as folder:
        findings, shown = asyncio.run(_replay(task, Path(folder)))
    if shown is not None:
        colour = is_coloured(options.color, sys.stdout)
        print(*([legend()] if colour else ()), render_trajectory(shown[0], shown[1], colour=colour), sep="\n")
    print(_format_findings(task, findings))
    return 0 if findings.equal else 1


def _build_task(config: Config, run: Path, step: int, options: ReplayOptions) -> ReplayTask:
    done = read_sessions(run)
    if not 1 <= step <= done.step:
        raise UsageError(f"{run} has {done.step} steps, so there is no step {step} to replay.")
    observe = config.observe
    strict = config.schedule.max_weight_staleness == 0 and config.async_rollout.over_sampling_batch_size is None
    samples = strict and observe.load_debug_rollout_data is None
    if options.sample is not None and not samples:
        reason = "depend on timing" if not strict else "were read from files"
        raise UsageError(f"The trajectories of {run} {reason}, so --sample cannot repeat one; remove it.")
    schedule = replace(
        config.schedule,
        num_rollout=done.get_planned_steps(step),
        num_epoch=None,
        save_interval=None,
        eval_interval=None,
        max_weight_staleness=0,
        reorder_window=1,
    )
    observe = replace(observe, save_debug_rollout_data=None)
    rollout = replace(config.rollout, eval_prompt_data=())
    if not samples:
        observe = replace(observe, load_debug_rollout_data=str(run))
        rollout = replace(rollout, curriculum_path=None)
    async_rollout = replace(config.async_rollout, over_sampling_batch_size=None, partial_rollout=False)
    replay_config = replace(config, schedule=schedule, observe=observe, rollout=rollout, async_rollout=async_rollout)
    start = _find_start(config, run, step)
    if start is not None and not samples:
        start = reset_prompt_cursor(start)
    recording, start_step = RolloutRecording(str(run)), 0 if start is None else start[1].step
    if (missing := recording.missing(range(start_step + 1, step + 1))) is not None:
        raise DataError(
            f"{recording.path(missing)} does not exist, so step {step} cannot be replayed; only runs without "
            "--disable-save-rollouts can."
        )
    count = sum(len(group.trajectories) for group in recording.read(step).groups)
    if options.sample is not None and options.sample >= count:
        raise UsageError(f"--sample {options.sample}: step {step} has trajectories 0 to {count - 1}.")
    return ReplayTask(run=run, step=step, start=start, config=replay_config, samples=samples, options=options)


def _find_start(config: Config, run: Path, step: int) -> tuple[Path, Cursor] | None:
    """The newest checkpoint before the step, or what the run started from; None for its initial weights."""
    folders = (run / "checkpoints" / checkpoint_name(number) for number in range(step - 1, 0, -1))
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is not None:
        return found, replace(read_cursor(found), log_offsets={})
    return None if config.schedule.load is None else resolve_load(Path(config.schedule.load), step)


def _load_image(task: ReplayTask) -> Callable[[str], ImageInput] | None:
    """What processes the run's images again; None for a checkpoint that reads text only."""
    models, media = task.config.models, task.config.media.build_store(task.run / "media")
    assert models.hf_checkpoint is not None
    return get_image_loader(
        load_processor(models.hf_checkpoint, media=media, trust_remote_code=models.trust_remote_code)
    )


async def _replay(task: ReplayTask, folder: Path) -> tuple[Findings, tuple[Trajectory, HfTokenizer] | None]:
    findings, plan = Findings(), build_plan(task.config)
    saved = task.run / "checkpoints" / checkpoint_name(task.step)
    compares_weights = saved.is_dir() and task.options.sample is None
    history = read_history(task.run, task.start_step, task.step, _load_image(task)) if task.samples else {}
    comparison = RolloutComparison(task.run, history, task.step, task.options, findings)
    journal = ReplayJournal(task.step, comparison, stops_before_training=task.options.sample is not None)
    replayed = await build_run(
        task.config,
        plan,
        checkpoints=TemporaryCheckpoints(folder, writes=compares_weights),
        journal=journal,
        start=task.start,
        timer=StartTimer(),
        wrap_planes=comparison.wrap_planes if task.samples else lambda planes: planes,
    )
    try:
        with journal.stopping(replayed.loop.stop_soon), contextlib.suppress(ReplayDone):
            await replayed.run()
    finally:
        await replayed.close()
    comparison.compare(replayed.policy.tokenizer.decode)
    if journal.metrics is not None:
        rows = {row.step: row.values for row in read_rows(task.run / "metrics.jsonl").select("train")}
        if task.step not in rows:
            raise DataError(f"{task.run / 'metrics.jsonl'} has no readable line of step {task.step} to compare with.")
        # Groups are only dropped again where prompts are sampled again.
        ignored = frozenset() if task.samples else frozenset({"groups_dropped"})
        before, after = (
            {n: v for n, v in row.items() if n not in ignored} for row in (rows[task.step], journal.metrics)
        )
        compare_metrics(before, after, findings, task.options.tolerance)
    if compares_weights:
        compare_checkpoints(saved, folder / checkpoint_name(task.step), findings, task.options.tolerance)
    shown = comparison.shown
    return findings, None if shown is None else (shown, replayed.policy.tokenizer)


def _describe_task(task: ReplayTask) -> str:
    start = "its initial weights" if task.start is None else str(task.start[0])
    between = range(task.start_step + 1, task.step)
    if len(between) > 1:
        start += f"; steps {between[0]} to {between[-1]} are trained again on their rollouts"
    elif between:
        start += f"; step {between[0]} is trained again on its rollouts"
    return f"step {task.step} of {task.run}, from {start}"


def _format_findings(task: ReplayTask, findings: Findings) -> str:
    lines = []
    for count in findings.counts.values():
        gap = f"   largest difference {format_number(count.largest)}" if count.largest else ""
        lines.append(f"  {count.what.ljust(10)} {str(count.equal).rjust(6)} of {count.compared} equal{gap}")
    if not task.samples:
        lines.append("  sampling   not repeated: these trajectories do not depend on the seed alone")
    if task.options.sample is None and "weights" not in findings.counts and "files" not in findings.counts:
        lines.append(f"  weights    not compared: no checkpoint was saved after step {task.step}")
    within = f" within {task.options.tolerance:g}" if task.options.tolerance else " bit for bit"
    verdict = f"equal{within}" if findings.equal else f"different; the first: {findings.first}"
    return "\n".join([*lines, verdict])
