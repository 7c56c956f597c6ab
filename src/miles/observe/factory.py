"""Factories of terminal views and of experiment trackers."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from miles.observe.config import METRICS_TOKEN, ObserveConfig
from miles.observe.tracker_records import RecordBuilder
from miles.observe.trackers import Tracker, TrackerIds, TrackerProcess, Trackers
from miles.observe.view import NullView, View, ViewKind, supports_cursor

_DEFAULT_PROJECT = "miles"


def build_view(kind: ViewKind, *, stream: TextIO | None = None, parity_tolerance: float = 0.01) -> View:
    """Build the view of a kind on a stream (default: standard output); without a terminal, live falls back to plain.

    On the standard output of a notebook, it is that of notebooks.
    """
    if kind == "none":
        return NullView()
    if kind != "plain" and stream is None and "IPython" in sys.modules:
        from miles.observe.notebook import NotebookView, is_notebook

        if is_notebook():
            return NotebookView(parity_tolerance=parity_tolerance)
    out = sys.stdout if stream is None else stream
    if kind != "plain" and supports_cursor(out):
        from miles.observe.live import LiveView

        return LiveView(out, parity_tolerance=parity_tolerance)
    from miles.observe.console import PlainView

    return PlainView(out, parity_tolerance=parity_tolerance)


# -- trackers -------------------------------------------------------------------------------


def build_trackers(
    config: ObserveConfig,
    run: Path,
    options: Mapping[str, Any],
    *,
    steps_per_rollout: int,
    note: Callable[[str], None],
    wall_clock: Callable[[], float],
    clock: Callable[[], float],
) -> Trackers:
    """Build the trackers of a run; ``options`` are stored with its curves.

    ``wall_clock`` reads seconds since the epoch, and ``clock`` seconds that only grow.
    """
    found = [
        *_build_local_trackers(config, run, wall_clock),
        *_build_tracker_processes(config, run, dict(options), steps_per_rollout),
    ]
    samples = RecordBuilder(max_samples=config.tracker_samples, interval=config.tracker_samples_interval)
    return Trackers(found, samples, note=note, clock=clock)


def _build_local_trackers(config: ObserveConfig, run: Path, clock: Callable[[], float]) -> Iterator[Tracker]:
    """Yield the trackers that need no process of their own."""
    if config.use_tensorboard:
        from miles.observe.tensorboard import TensorBoard

        yield TensorBoard(_find_tensorboard_folder(config, run), clock=clock)
    if config.use_prometheus or config.metrics_port is not None:
        from miles.observe.prometheus import DEFAULT_PORT, PrometheusEndpoint

        port = DEFAULT_PORT if config.metrics_port is None else config.metrics_port
        name = config.prometheus_run_name or run.name
        yield PrometheusEndpoint(config.metrics_host, port, run_name=name, token=os.environ.get(METRICS_TOKEN))
    if config.otlp_endpoint is not None:
        from miles.observe.opentelemetry import OtlpExporter

        yield OtlpExporter(config.otlp_endpoint, run_id=run.name, trace=run / "trace", clock=clock)


def _find_tensorboard_folder(config: ObserveConfig, run: Path) -> Path:
    if config.tb_project_name is not None:
        return Path(config.tb_project_name) / (config.tb_experiment_name or run.name)
    return Path(config.tb_dir) if config.tb_dir else run / "tensorboard"


def _build_tracker_processes(
    config: ObserveConfig, run: Path, options: dict[str, Any], steps_per_rollout: int
) -> Iterator[Tracker]:
    """Yield the trackers that run in a process of their own, each with its settings."""
    ids = TrackerIds(run)
    if config.use_wandb:
        group = config.wandb_group or run.name
        suffix = f"_{secrets.token_hex(4)}" if config.wandb_random_suffix else ""
        new = {"wandb_group": group + suffix, "wandb_run_id": secrets.token_hex(4)} | ids.read()
        ids.update(new if config.wandb_run_id is None else new | {"wandb_run_id": config.wandb_run_id})
        folder = Path(config.wandb_dir or run)  # wandb makes a folder wandb in it
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "team": config.wandb_team,
            "project": config.wandb_project or _DEFAULT_PROJECT,
            "dir": str(folder),
            "mode": config.wandb_mode,
            "steps_per_rollout": steps_per_rollout if config.wandb_always_use_train_step else 1,
            "options": options,
        }
        variables = {"WANDB_API_KEY": config.wandb_key, "WANDB_BASE_URL": config.wandb_host}
        yield _build_process("wandb", settings, run, ids, variables)
    if config.use_mlflow:
        settings = {
            "tracking_uri": config.mlflow_tracking_uri,
            "experiment_name": config.mlflow_experiment_name or _DEFAULT_PROJECT,
            "run_name": config.mlflow_run_name or run.name,
            "run_id": config.mlflow_run_id,
            "options": options,
        }
        yield _build_process("mlflow", settings, run, ids, {})
    if config.use_trackio:
        name = config.trackio_run_name or f"{run.name}_{secrets.token_hex(4)}"
        ids.update({"trackio_run_name": name} | ids.read())
        settings = {
            "project": config.trackio_project or _DEFAULT_PROJECT,
            "space_id": config.trackio_space_id,
            "server_url": config.trackio_server_url,
            "options": options,
        }
        yield _build_process("trackio", settings, run, ids, {"TRACKIO_DIR": config.trackio_dir})


def _build_process(
    name: str, settings: Mapping[str, Any], run: Path, ids: TrackerIds, variables: Mapping[str, str | None]
) -> TrackerProcess:
    environment = {name: value for name, value in variables.items() if value is not None}
    log_path = run / "logs" / f"tracker-{name}.log"
    return TrackerProcess(name, settings, ids=ids, log_path=log_path, environment=environment)
