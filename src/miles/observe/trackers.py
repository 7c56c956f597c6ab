"""Experiment trackers: every metric to Weights & Biases or to MLflow, whose packages are imported only when asked for.

A run keeps its ids there in ``trackers.json`` of the run directory, so that a resumed run continues the same curves.
Trackers are views: one that fails is reported and removed, and training goes on.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from miles.core.errors import UsageError, describe_error
from miles.core.events import Evaluated, Event, StepFinished
from miles.observe.config import ObserveConfig
from miles.observe.tensorboard import scalars_from_event

_DEFAULT_PROJECT = "miles"
# MLflow refuses more parameters per call, and longer ones.
_MLFLOW_PARAMS = 100
_MLFLOW_CHARS = 500


class ExternalTracker(Protocol):
    """An observer of a run that sends metrics elsewhere."""

    def __call__(self, event: Event) -> None: ...
    def close(self) -> None: ...


def build_external_trackers(
    config: ObserveConfig, run: Path, options: Mapping[str, Any], *, steps_per_rollout: int
) -> list[ExternalTracker]:
    """The trackers of a run; ``options`` are stored with its curves. UsageError if one cannot start."""
    builders: dict[str, Callable[[], ExternalTracker]] = {
        "wandb": lambda: WandbTracker(config, run, options, steps_per_rollout=steps_per_rollout),
        "mlflow": lambda: MlflowTracker(config, run, options),
    }
    trackers: list[ExternalTracker] = []
    for name in (name for name, is_used in (("wandb", config.use_wandb), ("mlflow", config.use_mlflow)) if is_used):
        try:
            trackers.append(builders[name]())
        except Exception as error:  # whatever the package raises: no network, no key, a wrong id
            raise UsageError(f"--use-{name} cannot start: {describe_error(error)}") from error
    return trackers


class WandbTracker:
    """Logs to Weights & Biases; ``step``, rollout steps or optimizer steps, is the horizontal axis of every chart."""

    def __init__(self, config: ObserveConfig, run: Path, options: Mapping[str, Any], *, steps_per_rollout: int) -> None:
        wandb: Any = import_module("wandb")
        if config.wandb_key is not None:
            os.environ["WANDB_API_KEY"] = config.wandb_key
        if config.wandb_host is not None:
            os.environ["WANDB_BASE_URL"] = config.wandb_host
        stored = _read_ids(run)
        group = stored.get("wandb_group") or _make_group(config, run)
        run_id = config.wandb_run_id or stored.get("wandb_run_id") or secrets.token_hex(4)
        folder = Path(config.wandb_dir or run)  # wandb makes a folder wandb in it
        folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            entity=config.wandb_team,
            project=config.wandb_project or _DEFAULT_PROJECT,
            group=group,
            name=group,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=config.wandb_mode,
            config=dict(options),
        )
        _write_ids(run, wandb_run_id=run_id, wandb_group=group)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._factor = steps_per_rollout if config.wandb_always_use_train_step else 1

    def __call__(self, event: Event) -> None:
        if isinstance(event, (StepFinished, Evaluated)):
            self._run.log({**scalars_from_event(event), "step": event.step * self._factor})

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """Logs to MLflow."""

    def __init__(self, config: ObserveConfig, run: Path, options: Mapping[str, Any]) -> None:
        self._mlflow: Any = import_module("mlflow")
        if config.mlflow_tracking_uri is not None:
            self._mlflow.set_tracking_uri(config.mlflow_tracking_uri)
        run_id = config.mlflow_run_id or _read_ids(run).get("mlflow_run_id")
        if run_id is None:
            self._mlflow.set_experiment(config.mlflow_experiment_name or _DEFAULT_PROJECT)
        active = self._mlflow.start_run(run_id=run_id, run_name=config.mlflow_run_name or run.name)
        _write_ids(run, mlflow_run_id=active.info.run_id)
        if run_id is None:
            params = [(name, str(value)[:_MLFLOW_CHARS]) for name, value in options.items() if value is not None]
            for start in range(0, len(params), _MLFLOW_PARAMS):
                self._mlflow.log_params(dict(params[start : start + _MLFLOW_PARAMS]))

    def __call__(self, event: Event) -> None:
        if isinstance(event, (StepFinished, Evaluated)):
            scalars = scalars_from_event(event)
            self._mlflow.log_metrics({_name_for_mlflow(name): scalars[name] for name in scalars}, step=event.step)

    def close(self) -> None:
        self._mlflow.end_run()


def _name_for_mlflow(name: str) -> str:
    """With one slash: a store of files cannot have both seconds/train and seconds/train/pack; @ is not allowed.

    >>> _name_for_mlflow("eval/easy/pass@4")
    'eval/easy.pass_at_4'
    """
    section, _, rest = name.partition("/")
    return f"{section}/{rest.replace('/', '.').replace('@', '_at_')}"


def _make_group(config: ObserveConfig, run: Path) -> str:
    group = config.wandb_group or run.name
    return f"{group}_{secrets.token_hex(4)}" if config.wandb_random_suffix else group


def _read_ids(run: Path) -> dict[str, str]:
    path = run / "trackers.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _write_ids(run: Path, **ids: str) -> None:
    (run / "trackers.json").write_text(json.dumps(_read_ids(run) | ids, indent=1, sort_keys=True))
