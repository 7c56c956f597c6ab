"""``miles replay``: a step of a run made again, from the checkpoint before it, and held against what was written down.

    checkpoint ──> steps between, trained on their rollouts ──> the step: sampled again and compared,
                                                                trained on its rollouts, metrics and weights compared

What is trained on is always what the run had, so that a difference in sampling makes none in training.
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
from miles.core.types import Trajectory
from miles.kernels import arithmetic
from miles.launch.again import Again, Enough, Witness, history_of, sessions_of
from miles.launch.config import Config, ReplayOptions
from miles.launch.findings import Findings, compare_checkpoints, compare_metrics
from miles.launch.plan import plan_of
from miles.launch.run import counted_anew, initial
from miles.launch.wire import wire
from miles.models.tokenizer import HubTokenizer
from miles.observe.painted import is_coloured, legend, painted
from miles.observe.read import read_rows
from miles.observe.text import figure
from miles.rollout.recorded import Recording
from miles.schedule.recover import Checkpoints, Cursor, Draft, name_of, read_cursor


class Aside(Checkpoints):
    """Checkpoints in a folder that is soon gone, or where it does not write, none."""

    def __init__(self, folder: Path, *, writes: bool) -> None:
        super().__init__(folder)
        self._aside, self._writes = folder, writes

    async def begin(self, cursor: Cursor, write: Callable[[Path], Awaitable[None]]) -> Draft:
        return await super().begin(cursor, write) if self._writes else Draft(self._aside, name_of(cursor.step), cursor)

    def finish(self, draft: Draft) -> str:
        return super().finish(draft) if self._writes else draft.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be replayed, from where, and whether its sampling can be repeated."""

    run: Path
    step: int
    start: tuple[Path, Cursor] | None
    config: Config
    samples: bool
    options: ReplayOptions

    @property
    def begun(self) -> int:
        """Steps that are behind it."""
        return 0 if self.start is None else self.start[1].step


def replay(config: Config, run: Path, step: int, options: ReplayOptions) -> int:
    """Replay a step and print what was found; 0 where all is equal, 1 where anything is not."""
    arithmetic.use(config.models.parity)
    order = _order(config, run, step, options)
    print(_opening(order), flush=True)
    with tempfile.TemporaryDirectory(prefix="miles-replay-") as aside:
        found, shown = asyncio.run(_replayed(order, Path(aside)))
    if shown is not None:
        colour = is_coloured(options.color, sys.stdout)
        print(*([legend()] if colour else ()), painted(shown[0], shown[1], colour=colour), sep="\n")
    print(_told(order, found))
    return 0 if found.equal else 1


def _order(config: Config, run: Path, step: int, options: ReplayOptions) -> Order:
    done = sessions_of(run)
    if not 1 <= step <= done.step:
        raise UsageError(f"{run} has {done.step} steps behind it, so there is no step {step} to replay.")
    observe = config.observe
    strict = config.schedule.max_weight_staleness == 0 and config.tempo.over_sampling_batch_size is None
    samples = strict and observe.load_debug_rollout_data is None
    if options.sample is not None and not samples:
        why = "were written or cut while others were" if not strict else "were read from files"
        raise UsageError(f"The trajectories of {run} {why}, so that --sample cannot sample one again; leave it out.")
    schedule = replace(
        config.schedule,
        num_rollout=done.steps_at(step),
        num_epoch=None,
        save_interval=None,
        eval_interval=None,
        max_weight_staleness=0,
        shelf_window=1,
    )
    observe = replace(observe, save_debug_rollout_data=None)
    rollout = replace(config.rollout, eval_prompt_data=())
    if not samples:
        observe = replace(observe, load_debug_rollout_data=str(run))
        rollout = replace(rollout, curriculum_path=None)
    tempo = replace(config.tempo, over_sampling_batch_size=None, partial_rollout=False)
    settled = replace(config, schedule=schedule, observe=observe, rollout=rollout, tempo=tempo)
    start = _before(config, run, step)
    if start is not None and not samples:
        start = counted_anew(start)
    recording, begun = Recording(str(run)), 0 if start is None else start[1].step
    if (gone := recording.missing(range(begun + 1, step + 1))) is not None:
        raise DataError(
            f"{recording.path(gone)} is not there, and step {step} cannot be made again without it; only runs without "
            "--disable-save-rollouts can be replayed."
        )
    count = sum(len(group.trajectories) for group in recording.read(step).groups)
    if options.sample is not None and options.sample >= count:
        raise UsageError(f"--sample {options.sample}: step {step} has trajectories 0 to {count - 1}.")
    return Order(run=run, step=step, start=start, config=settled, samples=samples, options=options)


def _before(config: Config, run: Path, step: int) -> tuple[Path, Cursor] | None:
    """The newest checkpoint from before the step, or what the run itself started from; None for its first weights."""
    folders = (run / "checkpoints" / name_of(number) for number in range(step - 1, 0, -1))
    found = next((folder for folder in folders if folder.is_dir()), None)
    if found is not None:
        return found, replace(read_cursor(found), marks={})
    return None if config.schedule.load is None else initial(Path(config.schedule.load), step)


async def _replayed(order: Order, folder: Path) -> tuple[Findings, tuple[Trajectory, HubTokenizer] | None]:
    found, plan = Findings(), plan_of(order.config)
    saved = order.run / "checkpoints" / name_of(order.step)
    kept = saved.is_dir() and order.options.sample is None
    past = history_of(order.run, order.begun, order.step) if order.samples else {}
    again = Again(order.run, past, order.step, order.options, found)
    witness = Witness(order.step, again, enough=order.options.sample is not None)
    wired = await wire(
        order.config,
        plan,
        checkpoints=Aside(folder, writes=kept),
        journal=witness,
        start=order.start,
        around=again.around if order.samples else lambda planes: planes,
    )
    try:
        again.decode = wired.policy.tokenizer.decode
        witness.stop = wired.loop.stop_soon
        with contextlib.suppress(Enough):
            await wired.run()
    finally:
        await wired.close()
    if witness.metrics is not None:
        rows = {row.step: row.values for row in read_rows(order.run / "metrics.jsonl").of("train")}
        # What was dropped is only met where prompts are drawn again.
        beside = frozenset() if order.samples else frozenset({"groups_dropped"})
        was, now = ({n: v for n, v in row.items() if n not in beside} for row in (rows[order.step], witness.metrics))
        compare_metrics(was, now, found, order.options.tolerance)
    if kept:
        compare_checkpoints(saved, folder / name_of(order.step), found, order.options.tolerance)
    shown = again.shown
    return found, None if shown is None else (shown, wired.policy.tokenizer)


def _opening(order: Order) -> str:
    start = "its first weights" if order.start is None else str(order.start[0])
    between = range(order.begun + 1, order.step)
    if len(between) > 1:
        start += f"; steps {between[0]} to {between[-1]} are trained again on their rollouts"
    elif between:
        start += f"; step {between[0]} is trained again on its rollouts"
    return f"step {order.step} of {order.run}, from {start}"


def _told(order: Order, found: Findings) -> str:
    lines = []
    for count in found.counts.values():
        gap = f"   largest difference {figure(count.largest)}" if count.largest else ""
        lines.append(f"  {count.what.ljust(10)} {str(count.equal).rjust(6)} of {count.compared} equal{gap}")
    if not order.samples:
        lines.append("  sampling   not repeated: these trajectories do not follow from the seed alone")
    if order.options.sample is None and "weights" not in found.counts and "files" not in found.counts:
        lines.append(f"  weights    not compared: no checkpoint was saved after step {order.step}")
    within = f" within {order.options.tolerance:g}" if order.options.tolerance else " to the bit"
    verdict = f"equal{within}" if found.equal else f"different; the first: {found.first}"
    return "\n".join([*lines, verdict])
