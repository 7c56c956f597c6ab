"""``miles train``: claim the run directory, wire the planes, run the loop, and say how it ended."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from miles.backends.native.engine import NativeEngine
from miles.cluster import stacks
from miles.core.errors import ResumeError
from miles.core.events import Event
from miles.core.protocols import Observer
from miles.kernels import arithmetic
from miles.launch.config import Config
from miles.launch.dumped import dumps_of
from miles.launch.elastic_rules import last_split, split_of
from miles.launch.found import newest_checkpoint
from miles.launch.garbage import collecting_seldom, inside_of
from miles.launch.hosting import placed
from miles.launch.mending import MendedTrainer
from miles.launch.parity_hint import ParityHint, pointed
from miles.launch.plan import Plan, plan_of
from miles.launch.plugged import trackers_of
from miles.launch.rundir import RunDirectory
from miles.launch.watchman import Watchman
from miles.launch.wire import Wired, wire
from miles.observe.curves import draw_curves
from miles.observe.fanout import Fanout, Keeper
from miles.observe.log import RunLogs
from miles.observe.read import read_rows
from miles.observe.summary import Summary, Turn, print_summary, summarise
from miles.observe.tensorboard import TensorBoard
from miles.observe.trace import Trace
from miles.observe.view import View, make_view
from miles.schedule.loop import Loop
from miles.schedule.recover import Checkpoints, Cursor, read_cursor

Watch = Callable[[Event], bool]
"""Told of every event; the loop stops soon after it answers true."""


def train(config: Config, plan: Plan, origins: Mapping[str, str]) -> int:
    """Run the whole of a training command; 0 when it finished, 130 when it was stopped early."""
    view = make_view(config.observe.view, parity_tolerance=config.schedule.parity_tolerance)
    try:
        finished = run(config, plan, origins, view=view)
    finally:
        view.close()
    directory = plan.run_dir
    if not finished:
        print(f"Stopped early and saved. The same command goes on from there: {_command(directory)}")
        return 130
    print_summary(closing(directory, commands=_next_commands(directory)), sys.stdout)
    return 0


def closing(
    directory: Path,
    *,
    commands: Sequence[tuple[str, str]],
    turns: Sequence[Turn] = (),
    wall_seconds: float | None = None,
) -> Summary:
    """The closing words of the run in ``directory``."""
    return summarise(
        read_rows(directory / "metrics.jsonl"),
        folder=directory,
        timings=read_rows(directory / "timings.jsonl"),
        wall_seconds=wall_seconds,
        turns=turns,
        commands=commands,
    )


def run(config: Config, plan: Plan, origins: Mapping[str, str], *, view: View, watch: Watch | None = None) -> bool:
    """Run the loop to its end or until it is asked to stop; true when it came to its end."""
    arithmetic.use(config.models.parity)
    with placed(config, plan.run_dir), pointed(config, plan.run_dir):
        return _in_directory(config, plan, origins, view=view, watch=watch)


def _in_directory(config: Config, plan: Plan, origins: Mapping[str, str], *, view: View, watch: Watch | None) -> bool:
    directory = RunDirectory(
        plan.run_dir,
        keep_checkpoints=config.schedule.keep_checkpoints,
        background=config.train.async_save,
        forgiving=config.schedule.save_failure == "warn",
    )
    try:
        start = directory.claim(config, origins)
        config, plan = continued(config, plan, view.note)
        resumed = start is not None
        if start is None and config.schedule.load is not None:
            start = initial(Path(config.schedule.load), plan.steps)
            if config.observe.load_debug_rollout_data is not None:
                start = counted_anew(start)
        return asyncio.run(_run(config, plan, directory, start, resumed=resumed, view=view, watch=watch))
    finally:
        directory.release()


def continued(config: Config, plan: Plan, note: Callable[[str], None]) -> tuple[Config, Plan]:
    """A run whose devices move, as it stood: with as many ranks and engines as it had last."""
    found = last_split(config, plan.run_dir)
    if found is config:
        return config, plan
    split = split_of(found)
    note(f"Ranks {split.ranks}, engines {split.engines}, as this run had them last (--elastic).")
    return found, plan_of(found)


async def _run(
    config: Config,
    plan: Plan,
    directory: RunDirectory,
    start: tuple[Path, Cursor] | None,
    *,
    resumed: bool,
    view: View,
    watch: Watch | None,
) -> bool:
    watcher = _Watcher(watch)
    stacks.open_folder(directory.path / "logs" / "stacks")
    watchman = Watchman(directory.path / "logs", config.schedule.stall_timeout, view.note)
    hint = ParityHint(config, directory.path, view.note)
    views = [view, watchman, hint, *trackers_of(config), *([watcher] if watch else [])]
    journal = _journal(config, directory, start[1] if start and resumed else None, view, views)
    try:
        with view.stage("Loading the model and the prompts"):
            wired = await wire(config, plan, checkpoints=directory.checkpoints, journal=journal, start=start)
        try:
            _announce(wired, start, resumed, view)
            if isinstance(wired.trainer, MendedTrainer):
                wired.trainer.tell = view.note
            for engine in wired.engines:
                if not isinstance(engine, NativeEngine):
                    engine.fleet.pace.tell += (view.note,)
            watcher.loop = wired.loop
            with _stop_on_signals(wired.loop, view), watchman.watching(), collecting_seldom(inside_of(config)):
                await wired.run()
            _draw(directory.path, view)
            return wired.loop.finished
        finally:
            await wired.close()
    finally:
        stacks.close_folder()
        journal.close()


def _draw(directory: Path, view: View) -> None:
    try:
        draw_curves(
            directory / "metrics.jsonl", directory / "curves.png", f"{directory.resolve().parent.name}/{directory.name}"
        )
    except ImportError as error:
        view.note(f"curves.png was not drawn: {error}")


class _Watcher:
    """An observer that may end the run early."""

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self.loop: Loop | None = None

    def __call__(self, event: Event) -> None:
        if self._watch is not None and self._watch(event) and self.loop is not None:
            self.loop.stop_soon()


def _journal(
    config: Config, directory: RunDirectory, cursor: Cursor | None, view: View, views: Sequence[Observer]
) -> Fanout:
    """Every log and sink of the run. Only a run whose order is a function of its seed must repeat to the bit."""
    ordered = config.schedule.max_weight_staleness == 0 and config.tempo.over_sampling_batch_size is None
    strict = ordered and not directory.rescheduled
    fresh = not (directory.path / "events.jsonl").exists()
    marks = None if fresh else (cursor.marks if cursor is not None else {})
    keepers: list[Keeper] = [Trace(directory.path / "trace", clock=time.time)]
    keepers += dumps_of(config, directory.path)
    if config.observe.use_tensorboard:
        folder = Path(config.observe.tb_dir) if config.observe.tb_dir else directory.path / "tensorboard"
        keepers.append(TensorBoard(folder, clock=time.time))
    logs = RunLogs(directory.path, resume_at=marks, strict=strict, clock=time.time)
    return Fanout(logs, keepers=keepers, views=views, report=view.note)


def initial(folder: Path, steps: int) -> tuple[Path, Cursor]:
    """Where ``--load`` points: a checkpoint, or a run whose newest is taken. A new run's logs start empty."""
    found = Checkpoints(folder / "checkpoints").latest()
    if found is None:
        if not (folder / "cursor.json").exists():
            raise ResumeError(
                f"--load {folder} holds no checkpoint of a run; a plain Hugging Face folder goes to --hf-checkpoint"
            )
        found = folder, read_cursor(folder)
    if not (found[0] / "config.json").is_file():
        raise ResumeError(f"--load {found[0]} holds no weights, for its run trained nothing; name a run that did")
    if found[1].step >= steps:
        raise ResumeError(
            f"--load {found[0]} has {found[1].step} steps behind it and this run is to end after {steps}; "
            "raise --num-rollout, or start from its weights alone with --hf-checkpoint"
        )
    return found[0], replace(found[1], marks={})


def counted_anew(start: tuple[Path, Cursor]) -> tuple[Path, Cursor]:
    """Where another run stood, for one that has groups of its own and no use for that run's place among prompts."""
    return start[0], replace(start[1], ticket=0, dealt=(), source={})


def _announce(wired: Wired, start: tuple[Path, Cursor] | None, resumed: bool, view: View) -> None:
    policy = wired.policy
    view.note(f"{policy.folder} on {policy.platform.name} in {str(policy.dtype).removeprefix('torch.')}")
    for note in wired.notes:
        view.note(note)
    if start is not None:
        view.note(f"{'Going on' if resumed else 'Starting'} from {start[0]}, after step {start[1].step}")


@contextmanager
def _stop_on_signals(loop: Loop, view: View) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) finishes the step and saves; the second ends the process as usual."""
    running = asyncio.get_running_loop()

    def stop() -> None:
        view.note("Stopping: this step is finished and saved first (press Ctrl-C again to drop it).")
        loop.stop_soon()
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        running.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            running.remove_signal_handler(number)


def _command(directory: Path) -> str:
    return f"miles train {directory / 'config.toml'} --save {directory}"


def _next_commands(directory: Path) -> list[tuple[str, str]]:
    chat = [(f"miles chat {directory}", "talk to it")] if newest_checkpoint(directory) is not None else []
    show = [(f"miles show {directory}", "read what it sampled")] if (directory / "rollouts").is_dir() else []
    return [
        *chat,
        *show,
        (f"miles plan {directory / 'config.toml'}", "every knob of this run, and who set it"),
    ]
