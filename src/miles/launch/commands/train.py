"""``miles train``: claim the run directory, build the run, run the loop, and report how it ended."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from miles.cluster import stack_dump
from miles.cluster.gpu_counters import HostGpuCounters, RemoteHosts
from miles.cluster.hub_client import HubError
from miles.cluster.platform import GpuCounters
from miles.cluster.profiler import RolloutProfiler
from miles.config.provenance import flatten_values
from miles.core.errors import ParityError, ResumeError, storage_errors
from miles.core.events import Event, StepFinished
from miles.core.protocols import Observer
from miles.kernels.numerics import configure_cublas
from miles.kernels.runtime.triton_compat import start_hashing_triton, watch_compilation
from miles.launch.build.debug import build_rollout_dumps
from miles.launch.build.models import build_hf_conversion, build_profile_settings
from miles.launch.build.run import TrainingRun, build_run
from miles.launch.build.user_hooks import load_trackers
from miles.launch.config import Config
from miles.launch.dashboard.process import start_dashboard
from miles.launch.distributed.driver import set_train_env_vars
from miles.launch.distributed.ray_placement import get_reservation, reserve_cluster
from miles.launch.hub.mirror import CheckpointMirror, restore_run
from miles.launch.hub.resolve import describe_name
from miles.launch.plan.drafts import choose_speculation, is_repeatable
from miles.launch.plan.plan import Plan, build_plan, choose_parity_tolerance, count_samples_per_prompt
from miles.launch.plan.topology import get_split, is_remote, restore_split
from miles.launch.policies.config import get_main_config
from miles.launch.precompile.process import Precompilation
from miles.launch.rules.model import HUB_TOKEN
from miles.launch.rules.paths import find_newest_checkpoint
from miles.launch.runtime.gc_tuning import reduce_gc
from miles.launch.runtime.hook_watchdog import HookWatchdog
from miles.launch.runtime.input_fingerprint import check_inputs
from miles.launch.runtime.oom_report import report_out_of_memory
from miles.launch.runtime.run_directory import RunDirectory
from miles.launch.runtime.signals import StopSignals, exit_code_from_signal
from miles.launch.runtime.watchdog import StallWatchdog
from miles.launch.upstream.verify import format_flag_outcomes, list_flag_outcomes
from miles.models.checkpoint.torch_dist_folders import TRACKER, format_iteration, write_tracker
from miles.observe.config import format_step_path
from miles.observe.event_bus import DurableSink, EventBus
from miles.observe.factory import build_trackers, build_view
from miles.observe.formatting import ParityStatus, classify_parity
from miles.observe.log import RunLogs
from miles.observe.log_reader import read_rows
from miles.observe.output import print_error
from miles.observe.plots import plot_curves
from miles.observe.prompt_audit import audit_prompts
from miles.observe.start_timer import StartTimer
from miles.observe.summary import BeforeAfter, Summary, print_summary, summarise
from miles.observe.trace import GaugeSampler, LoopTrace
from miles.observe.trackers import Trackers
from miles.observe.view import View
from miles.schedule.checkpoints import CheckpointDirectory, Cursor, read_cursor
from miles.schedule.hf_export import HfExport
from miles.schedule.iteration_tracker import IterationTracker
from miles.schedule.loop import Loop

if TYPE_CHECKING:
    from miles.backends.remote.server_profiler import ServerProfiler

# After this time a run compiles its kernels itself.
_PRECOMPILE_SECONDS = 10.0
UPLOAD_FAILED = 3
"""Exit status of a run that finished but was not uploaded."""
StopCondition = Callable[[Event], bool]
"""Called with every event; the loop stops soon after it returns true."""


def train(
    config: Config,
    plan: Plan,
    origins: Mapping[str, str],
    timer: StartTimer | None = None,
    precompilation: Precompilation | None = None,
) -> int:
    """Run a training command; 0 when it finished, 3 when only its upload failed, 128 + signal if one stopped it."""
    view = build_view(config.observe.view, parity_tolerance=choose_parity_tolerance(config))
    signals = StopSignals(view.note, view.close)
    for line in format_flag_outcomes(list_flag_outcomes(get_main_config(config))):
        view.note(line)
    try:
        finished = run(config, plan, origins, view=view, signals=signals, timer=timer, precompilation=precompilation)
    finally:
        view.close()
    directory = plan.run_dir
    if not finished:
        command = f"miles train {directory / 'config.toml'} --save {directory}"
        print(f"Stopped early and saved. The same command resumes the run: {command}")
        ended_as_asked = signals.received is None and config.schedule.debug_exit_after_rollout is not None
        return 0 if ended_as_asked else exit_code_from_signal(signals.received or signal.SIGINT)
    summary = summarize_run(directory, commands=_list_next_commands(directory))
    print_summary(summary, sys.stdout, plain=config.observe.view == "plain")
    return 0 if config.hub.push_to_hub is None else _upload(config, directory)


def _upload(config: Config, directory: Path) -> int:
    """Upload the finished run; 3 where that failed, which changes nothing of the run."""
    from miles.launch.hub.upload import push_to_hub

    try:
        print(f"Uploaded to {push_to_hub(config, directory, os.environ[HUB_TOKEN])}")
    except HubError as error:
        print_error(f"miles: {error}")
        return UPLOAD_FAILED
    return 0


def summarize_run(
    directory: Path,
    *,
    commands: Sequence[tuple[str, str]],
    examples: Sequence[BeforeAfter] = (),
    wall_seconds: float | None = None,
) -> Summary:
    """The summary of the run in ``directory``."""
    return summarise(
        read_rows(directory / "metrics.jsonl"),
        folder=directory,
        timings=read_rows(directory / "timings.jsonl"),
        wall_seconds=wall_seconds,
        examples=examples,
        commands=commands,
    )


def run(
    config: Config,
    plan: Plan,
    origins: Mapping[str, str],
    *,
    view: View,
    stop_when: StopCondition | None = None,
    signals: StopSignals | None = None,
    timer: StartTimer | None = None,
    precompilation: Precompilation | None = None,
) -> bool:
    """Run the loop to its end or until it is stopped; true at its end. Its start waits for ``precompilation``."""
    started = _Start(timer or StartTimer(), precompilation)
    started.watch_kernels()
    set_train_env_vars(config)
    configure_cublas(config.models.numerics)
    signals = signals or StopSignals(view.note, view.close)
    with (
        reserve_cluster(config, plan.run_dir),
        signals.handling(),  # after Ray has installed its handlers
        HookWatchdog(config.schedule.stall_timeout, lambda: signals.received, print_error).watching(),
        add_parity_command(config, plan.run_dir),
        report_out_of_memory(config, plan),
    ):
        directory = RunDirectory(
            plan.run_dir,
            keep_checkpoints=config.schedule.keep_checkpoints,
            background=config.train.async_save,
            forgiving=config.schedule.save_failure == "warn",
        )
        if config.hub.save_remote is not None and (name := restore_run(config.hub.save_remote, plan.run_dir)):
            view.note(f"{name} was copied back from {config.hub.save_remote}")
        try:
            start = directory.claim(config, origins)
            if start is not None and start[1].step > plan.steps:
                view.note(
                    f"{plan.run_dir} has finished {start[1].step} steps, and this command asks for {plan.steps}: "
                    "nothing is left to train; raise --num-rollout or --num-epoch to train further."
                )
                return True
            config, plan = _restore_elastic_split(config, plan, view.note)
            resumed = start is not None
            with storage_errors(plan.run_dir):
                for note in check_inputs(plan.run_dir, config, plan, newest=start[0] if start else None):
                    view.note(note)
            loads_other_run = config.schedule.load is not None and not _is_same_run(config.schedule.load, plan)
            if start is None and config.schedule.load is not None and loads_other_run:
                start = resolve_load(Path(config.schedule.load), plan.steps)
                if config.observe.load_debug_rollout_data is not None:
                    start = reset_prompt_cursor(start)
            stopper = _EarlyStop(_choose_stop(config, start, stop_when))
            run_loop = partial(_run, resumed=resumed, view=view, stopper=stopper, signals=signals, started=started)
            finished = asyncio.run(run_loop(config, plan, directory, start))
            if finished:
                _audit_prompts(config, directory.path)
            return finished
        finally:
            directory.release()


def _audit_prompts(config: Config, directory: Path) -> None:
    """Raise PromptAuditError if the log shows a prompt twice, or an epoch that skipped one."""
    passes_over_all = (
        config.hooks.data_source_path is None
        and config.rollout.curriculum_path is None
        and len(config.rollout.prompt_data) == 1
        and config.observe.load_debug_rollout_data is None
    )
    if config.observe.load_debug_rollout_data is None:
        with storage_errors(directory):
            audit_prompts(directory / "events.jsonl", whole_epochs=passes_over_all)


def _is_same_run(load: str, plan: Plan) -> bool:
    """Whether --load names the directory of this run, which is continued anyway once it has a checkpoint."""
    return Path(load).resolve() == plan.run_dir.resolve()


def _restore_elastic_split(config: Config, plan: Plan, note: Callable[[str], None]) -> tuple[Config, Plan]:
    """Config and plan with the ranks and engines that an elastic run had last."""
    restored = restore_split(config, plan.run_dir)
    if restored is config:
        return config, plan
    split = get_split(restored)
    note(f"Ranks {split.ranks}, engines {split.engines}, as this run had them last (--elastic).")
    return restored, build_plan(restored)


async def _run(
    config: Config,
    plan: Plan,
    directory: RunDirectory,
    start: tuple[Path, Cursor] | None,
    *,
    resumed: bool,
    view: View,
    stopper: _EarlyStop,
    signals: StopSignals,
    started: _Start,
) -> bool:
    with storage_errors(directory.path):
        stack_dump.create_dump_dir(directory.path / "logs" / "stacks", "driver")
    watchdog = StallWatchdog(directory.path / "logs", config.schedule.stall_timeout, view.note)
    mirror = _build_mirror(config, directory, view)
    dashboard = start_dashboard(config.observe, directory.path, view.note)
    server_profiler = _build_server_profiler(config, directory.path, view.note)
    views = [
        *([] if mirror is None else [mirror]),
        view,
        watchdog,
        ParityHint(config, directory.path, view.note),
        *load_trackers(config),
        *_build_rollout_profiler(config, directory.path),
        *([] if server_profiler is None else [server_profiler]),
        stopper,
    ]
    with storage_errors(directory.path):
        trackers = _start_trackers(config, plan, directory.path, view)
        journal = _build_journal(config, directory, start[1] if start and resumed else None, view, [*views, trackers])
    try:
        started.timer.lap("run_dir")
        with view.stage("Loading the model and the prompts"):
            build = partial(build_run, config, plan, report=view.note, timer=started.timer)
            training = await build(checkpoints=directory.checkpoints, journal=journal, start=start)
        try:
            _print_start(training, start, resumed, view)
            await started.wait_for_kernels()
            with (
                signals.stopping(training.loop.stop_soon),
                stopper.stopping(training.loop),
                watchdog.watching(training.generation.hook_worker.list_loops),
                reduce_gc(_count_inflight_trajectories(config)),
                sampling_gauges(config, directory.path, training, view.note),
            ):
                async with _profiling_servers(server_profiler, training):
                    await training.run()
            _plot_curves(directory.path, view)
            return training.loop.finished
        finally:
            await training.close()
    finally:
        stack_dump.remove_dump_dir()
        journal.close()
        trackers.close()
        if mirror is not None:
            mirror.close()
        if dashboard is not None:
            dashboard.close()


@asynccontextmanager
async def _profiling_servers(profiler: ServerProfiler | None, training: TrainingRun) -> AsyncIterator[None]:
    """Profile the servers of a run meanwhile; wait until they have written their traces, before they end."""
    if profiler is None or training.servers is None:
        yield
        return
    profiler.connect(training.servers.pool)
    try:
        yield
    finally:
        await asyncio.to_thread(profiler.close)


@contextmanager
def sampling_gauges(
    config: Config, directory: Path, training: TrainingRun, note: Callable[[str], None]
) -> Iterator[None]:
    """Sample the gauges of engines, and of the GPUs of all hosts, in a thread, every --gauge-interval."""
    o = config.observe
    if not o.gauge_interval:
        yield
        return
    counters, gpus = GpuCounters(), None
    if counters.available or training.policy.platform.kind != "cpu":
        gpus = HostGpuCounters(
            lambda: counters.read() if counters.available else counters.why, _build_remote_counters(), note
        )
    with storage_errors(directory):
        sampler = GaugeSampler(
            directory / "trace",
            engines=[engine.read_gauges for engine in training.engines],
            devices=[] if gpus is None else [gpus.read],
            interval=o.gauge_interval,
            clock=time.time,
            max_bytes=o.trace_max_mb * 10**6,
        )
    sampler.start()
    try:
        yield
    finally:
        sampler.close()
        if gpus is not None:
            gpus.close()
        counters.close()


def _build_remote_counters() -> RemoteHosts | None:
    """The GPU counters of the other nodes of a Ray cluster; None where the run is on this machine alone."""
    reservation = get_reservation()
    if reservation is None:
        return None
    from miles.cluster.ray.host_counters import RayHostCounters

    return RayHostCounters(reservation)


def _build_rollout_profiler(config: Config, directory: Path) -> list[Observer]:
    settings = build_profile_settings(config, directory)
    return [RolloutProfiler(settings)] if "rollout" in settings.targets and not is_remote(config) else []


def _build_server_profiler(config: Config, directory: Path, note: Callable[[str], None]) -> ServerProfiler | None:
    settings = build_profile_settings(config, directory)
    if "rollout" not in settings.targets or not is_remote(config):
        return None
    from miles.backends.remote.server_profiler import ServerProfiler  # imports an HTTP client

    return ServerProfiler(settings, note)


def _build_mirror(config: Config, directory: RunDirectory, view: View) -> CheckpointMirror | None:
    h, keep = config.hub, config.schedule.keep_checkpoints
    return None if h.save_remote is None else CheckpointMirror(h.save_remote, directory.path, keep=keep, note=view.note)


def _start_trackers(config: Config, plan: Plan, run: Path, view: View) -> Trackers:
    if config.observe.wandb_key is not None:
        view.note("--wandb-key: other users of this machine can read a command line; set WANDB_API_KEY instead.")
    return build_trackers(
        config.observe,
        run,
        flatten_values(config),
        steps_per_rollout=plan.num_steps_per_rollout,
        note=view.note,
        wall_clock=time.time,
        clock=time.monotonic,
    )


def _count_inflight_trajectories(config: Config) -> int:
    """Most trajectories between admission and training."""
    r = config.rollout
    groups = config.async_rollout.over_sampling_batch_size or r.rollout_batch_size
    return (config.schedule.max_weight_staleness + 1) * groups * count_samples_per_prompt(config)


def _plot_curves(directory: Path, view: View) -> None:
    title = f"{directory.resolve().parent.name}/{directory.name}"
    try:
        plot_curves(directory / "metrics.jsonl", directory / "curves.png", title)
    except (ImportError, OSError) as error:
        view.note(f"curves.png was not written: {error}")


def _build_journal(
    config: Config, directory: RunDirectory, cursor: Cursor | None, view: View, views: Sequence[Observer]
) -> EventBus:
    """Every log and sink of the run; logs must repeat exactly where the events depend only on the seed."""
    # A resumed run makes other drafts, and without batch-invariant kernels log-probs depend on the rows of a step.
    drafts = choose_speculation(config).algorithm != "none" and config.models.parity != "exact"
    strict = is_repeatable(config) and not drafts and not directory.rescheduled
    is_new = cursor is None and not (directory.path / "events.jsonl").exists()
    offsets = None if is_new else (cursor.log_offsets if cursor is not None else {})
    max_bytes = config.observe.trace_max_mb * 10**6
    sinks: list[DurableSink] = [LoopTrace(directory.path / "trace", clock=time.time, max_bytes=max_bytes)]
    sinks += build_rollout_dumps(config, directory.path)
    if config.schedule.save_hf is not None:
        target = partial(format_step_path, config.schedule.save_hf)
        sinks.append(HfExport(directory.path / "checkpoints", target, build_hf_conversion(config)))
    if config.train.ckpt_format == "torch_dist":
        sinks.append(IterationTracker(directory.path, format_iteration, write_tracker))
    logs = RunLogs(directory.path, resume_at=offsets, strict=strict, clock=time.time)
    return EventBus(logs, folder=directory.path, sinks=sinks, views=views, report=view.note)


def _print_start(training: TrainingRun, start: tuple[Path, Cursor] | None, resumed: bool, view: View) -> None:
    policy = training.policy
    view.note(
        f"{describe_name(str(policy.folder))} on {policy.platform.name} in {str(policy.dtype).removeprefix('torch.')}"
    )
    for note in training.notes:
        view.note(note)
    if start is not None:
        view.note(f"{'Resuming' if resumed else 'Starting'} from {start[0]}, after step {start[1].step}")


def _list_next_commands(directory: Path) -> list[tuple[str, str]]:
    commands: list[tuple[str, str]] = []
    if find_newest_checkpoint(directory) is not None:
        commands.append((f"miles chat {directory}", "chat with it"))
    if (directory / "rollouts").is_dir():
        commands.append((f"miles show {directory}", "read its trajectories"))
    commands.append((f"miles view {directory}", "see its curves and trajectories in the browser"))
    return [*commands, (f"miles plan {directory / 'config.toml'}", "every option of this run and its origin")]


@dataclass(frozen=True, slots=True)
class _Start:
    """The start of a run: its timer, and the process that compiles its kernels, if there is one."""

    timer: StartTimer
    precompilation: Precompilation | None

    def watch_kernels(self) -> None:
        """Count kernels that are compiled here, and prepare for it what takes time."""
        watch_compilation(self.timer.add)
        if torch.cuda.is_available():
            start_hashing_triton()

    async def wait_for_kernels(self) -> None:
        """Wait for the kernels of the first rollout, when all else is built."""
        self.timer.lap("loop")
        if self.precompilation is not None:
            await asyncio.to_thread(self.precompilation.wait, _PRECOMPILE_SECONDS)
            self.timer.lap("kernels")


# -- where a run starts ---------------------------------------------------------------------


def resolve_load(folder: Path, steps: int) -> tuple[Path, Cursor]:
    """The checkpoint of ``--load``, a checkpoint or a run, whose newest is used; the logs of a new run start empty."""
    found = CheckpointDirectory(folder / "checkpoints").latest()
    if found is None:
        if not (folder / "cursor.json").exists() and ((folder / TRACKER).exists() or (folder / ".metadata").exists()):
            raise ResumeError(
                f"--load {folder} is a checkpoint of Megatron that no run here wrote, and has no state of a run; start "
                f"from its weights: miles convert {folder} OUT --format bfloat16 --origin-hf-dir MODEL, and "
                "--hf-checkpoint OUT"
            )
        if not (folder / "cursor.json").exists():
            raise ResumeError(
                f"--load {folder} has no checkpoint of a run; give a plain Hugging Face folder to --hf-checkpoint"
            )
        found = folder, read_cursor(folder)
    if not (found[0] / "config.json").is_file():
        raise ResumeError(f"--load {found[0]} has no weights, since its run did not train; name a run that did")
    if found[1].step >= steps:
        raise ResumeError(
            f"--load {found[0]} is at step {found[1].step}, but this run ends after {steps}; raise --num-rollout, or "
            "start from its weights alone with --hf-checkpoint"
        )
    return found[0], replace(found[1], log_offsets={})


def reset_prompt_cursor(start: tuple[Path, Cursor]) -> tuple[Path, Cursor]:
    """The start for a run with recorded groups, which has no use for the other run's position in its prompts."""
    return start[0], replace(start[1], ticket=0, done_tickets=(), source={})


# -- how it ends ----------------------------------------------------------------------------


def _is_last_step(count: int | None, first: int, event: Event) -> bool:
    """Whether this command has made the steps of --debug-exit-after-rollout."""
    return count is not None and isinstance(event, StepFinished) and event.step - first >= count


def _choose_stop(config: Config, start: tuple[Path, Cursor] | None, stop_when: StopCondition | None) -> StopCondition:
    first = start[1].step if start else 0
    return stop_when or partial(_is_last_step, config.schedule.debug_exit_after_rollout, first)


class _EarlyStop:
    """An observer that stops the loop when the condition is met."""

    def __init__(self, condition: StopCondition) -> None:
        self._condition = condition
        self._stop: Callable[[], None] = lambda: None

    @contextmanager
    def stopping(self, loop: Loop) -> Iterator[None]:
        self._stop = loop.stop_soon
        yield

    def __call__(self, event: Event) -> None:
        if self._condition(event):
            self._stop()


# -- parity hint ----------------------------------------------------------------------------


def format_parity_command(config: Config, directory: Path, step: int | None = None) -> str:
    """The ``miles parity`` command for a run: its engine and trainer, on the tokens of ``step`` if they are saved."""
    s, saved = config.sglang, find_newest_checkpoint(directory) is not None
    words = ["miles", "parity", str(directory) if saved else str(config.models.hf_checkpoint)]
    if saved and step is not None and config.observe.save_rollouts:
        words += ["--step", str(step)]
    if s.rollout_external_engine_addrs:
        address = s.rollout_external_engine_addrs[0]
        engine = address if "://" in address else f"http://{address}"
    else:
        engine = "sglang" if s.rollout_backend == "sglang" else "native"
    words += ["--a", engine, "--b", config.train.train_backend]
    if engine == "sglang" and s.sglang_python is not None:
        words += ["--sglang-python", s.sglang_python]
    if config.models.dtype != "auto":
        words += ["--dtype", config.models.dtype]
    if config.cluster.device != "auto":
        words += ["--device", config.cluster.device]
    if config.models.parity == "exact":
        words += ["--parity", "exact", "--exact"]
    if config.models.trust_remote_code:
        words.append("--trust-remote-code")
    return shlex.join(words)


class ParityHint:
    """An observer: when the parity status first turns red, ``note`` is called with the parity command."""

    def __init__(self, config: Config, directory: Path, note: Callable[[str], None]) -> None:
        self._config = config
        self._directory = directory
        self._note = note
        self._is_reported = False

    def __call__(self, event: Event) -> None:
        if self._is_reported or not isinstance(event, StepFinished) or "parity_mean_abs" not in event.metrics:
            return
        gap = event.metrics["parity_mean_abs"]
        if classify_parity(gap, choose_parity_tolerance(self._config)) is ParityStatus.RED:
            self._is_reported = True
            command = format_parity_command(self._config, self._directory, event.step)
            self._note(
                f"Parity is red at step {event.step} (mean difference {gap:.2e}); find the operation in which engine "
                f"and trainer first differ with: {command}"
            )


@contextmanager
def add_parity_command(config: Config, directory: Path) -> Iterator[None]:
    """Add the parity command to the error of a run that stops because engine and trainer differ."""
    try:
        yield
    except ParityError as error:
        command = format_parity_command(config, directory)
        raise ParityError(f"{error}; {command} finds the operation in which they first differ") from error
