"""Process of one experiment tracker: reads records as JSON lines and logs them to wandb, MLflow or Trackio.

The first line names the tracker, its settings and the ids that the run has there; every further line is a record, and
an empty one ends the run. Each line is answered by one line: an object, with ``error`` where the package raised. If
the input ends without an empty line, the run was killed, and is marked so. What packages print goes to standard error,
without secrets.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, TextIO

from miles.core.errors import describe_error
from miles.observe.tracker_records import SAMPLE_COLUMNS, TrackerRecord, decode_record, hide_secrets

# MLflow refuses more parameters per call, and longer ones.
_MLFLOW_PARAMS = 100
_MLFLOW_CHARS = 500
_SQLITE = "sqlite:///"
_NOT_FOR_MLFLOW = re.compile(r"[^\w.\- /]")


class _TrackerRun(Protocol):
    """An open run of a tracker: its ids, to be kept, and where to look at it."""

    ids: Mapping[str, str]
    message: str

    def log(self, record: TrackerRecord) -> None: ...
    def finish(self, *, was_killed: bool) -> None: ...


class WandbRun:
    """A run of Weights & Biases; ``step``, of rollouts or of the optimizer, is the horizontal axis of every chart."""

    def __init__(self, settings: Mapping[str, Any], ids: Mapping[str, str]) -> None:
        self._wandb: Any = import_module("wandb")
        self._run = self._wandb.init(
            entity=settings["team"],
            project=settings["project"],
            group=ids["wandb_group"],
            name=ids["wandb_group"],
            id=ids["wandb_run_id"],
            resume="allow",
            dir=settings["dir"],
            mode=settings["mode"],
            config=settings["options"],
            settings=self._wandb.Settings(console="off", silent=True),
        )
        self.ids: Mapping[str, str] = {}
        where = self._run.url or f"wandb sync {settings['dir']}/wandb/offline-run-*-{ids['wandb_run_id']}"
        self.message = f"Weights & Biases: {where}"
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._factor = int(settings["steps_per_rollout"])

    def log(self, record: TrackerRecord) -> None:
        """Log the scalars, and the samples as a table."""
        values: dict[str, Any] = dict(record.scalars)
        if record.samples:
            values["samples"] = self._wandb.Table(
                columns=list(SAMPLE_COLUMNS), data=[list(row) for row in record.samples]
            )
        if values:
            self._run.log({**values, "step": record.step * self._factor})

    def finish(self, *, was_killed: bool) -> None:
        """Mark the run as finished or crashed, with everything sent."""
        self._run.finish(exit_code=int(was_killed))


class MlflowRun:
    """A run of MLflow; tables of samples are its artifacts ``samples/step-*.json``."""

    def __init__(self, settings: Mapping[str, Any], ids: Mapping[str, str]) -> None:
        mlflow: Any = import_module("mlflow")
        self._entities: Any = import_module("mlflow.entities")
        self._clock: Any = import_module("time").time
        if settings["tracking_uri"] is not None:
            mlflow.set_tracking_uri(settings["tracking_uri"])
        self._client = mlflow.MlflowClient()
        run_id = settings["run_id"] or ids.get("mlflow_run_id")
        if run_id is None:
            experiment_id = self._find_experiment(settings["experiment_name"], mlflow.get_tracking_uri())
            self._run_id = self._client.create_run(experiment_id, run_name=settings["run_name"]).info.run_id
            self._log_params(settings["options"])
        else:
            self._run_id = self._client.get_run(run_id).info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        self.ids = {"mlflow_run_id": self._run_id}
        self.message = f"MLflow: run {self._run_id} in {mlflow.get_tracking_uri()}"

    def log(self, record: TrackerRecord) -> None:
        """Log the scalars, and the samples as a table."""
        now = round(self._clock() * 1000)
        metrics = [
            self._entities.Metric(name_for_mlflow(name), value, now, record.step)
            for name, value in record.scalars.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)
        if record.samples:
            columns = dict(zip(SAMPLE_COLUMNS, map(list, zip(*record.samples, strict=True)), strict=True))
            self._client.log_table(self._run_id, columns, f"samples/step-{record.step:06d}.json")

    def finish(self, *, was_killed: bool) -> None:
        """Mark the run as finished or killed."""
        self._client.set_terminated(self._run_id, "KILLED" if was_killed else "FINISHED")

    def _find_experiment(self, name: str, uri: str) -> str:
        """Find or make the experiment; beside a local database, artifacts go to a folder next to it."""
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return found.experiment_id
        path = Path(uri.removeprefix(_SQLITE)).resolve()
        folder = str(path.parent / "mlartifacts") if uri.startswith(_SQLITE) else None
        return self._client.create_experiment(name, artifact_location=folder)

    def _log_params(self, options: Mapping[str, Any]) -> None:
        params = [
            self._entities.Param(name, str(value)[:_MLFLOW_CHARS])
            for name, value in options.items()
            if value is not None and str(value)
        ]
        for start in range(0, len(params), _MLFLOW_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MLFLOW_PARAMS])


class TrackioRun:
    """A run of Trackio, in its local database, on a server of your own, or in a Hugging Face Space."""

    def __init__(self, settings: Mapping[str, Any], ids: Mapping[str, str]) -> None:
        self._trackio: Any = import_module("trackio")
        self._run = self._trackio.init(
            project=settings["project"],
            name=ids["trackio_run_name"],
            space_id=settings["space_id"],
            server_url=settings["server_url"],
            config={name: value for name, value in settings["options"].items() if value is not None},
            resume="allow",
            embed=False,
        )
        self.ids: Mapping[str, str] = {}
        where = settings["space_id"] or settings["server_url"] or f"trackio show --project {settings['project']}"
        self.message = f"Trackio: run {ids['trackio_run_name']}, {where}"

    def log(self, record: TrackerRecord) -> None:
        """Log the scalars, and the samples as a table."""
        values: dict[str, Any] = dict(record.scalars)
        if record.samples:
            values["samples"] = self._trackio.Table(
                columns=list(SAMPLE_COLUMNS), data=[list(row) for row in record.samples]
            )
        if values:
            self._run.log(values, step=record.step)

    def finish(self, *, was_killed: bool) -> None:
        """Return when everything is written; Trackio has no state of a run that was killed."""
        self._run.finish()


_RUNS: Mapping[str, type[Any]] = {"wandb": WandbRun, "mlflow": MlflowRun, "trackio": TrackioRun}


def name_for_mlflow(name: str) -> str:
    """With one slash: a store of files cannot have both seconds/train and seconds/train/pack; @ is not allowed.

    >>> name_for_mlflow("eval/easy/pass@4")
    'eval/easy.pass_at_4'
    """
    section, _, rest = name.replace("@", "_at_").partition("/")
    return _NOT_FOR_MLFLOW.sub("_", f"{section}/{rest.replace('/', '.')}")


class _ScrubbedStream:
    """Standard error without secrets, line by line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(hide_secrets(text, os.environ))
        self._stream.flush()
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer every line until the input ends."""
    run: _TrackerRun | None = None
    is_finished = False
    for line in lines:
        try:
            answer: dict[str, Any] = {}
            if run is None:
                opening = json.loads(line)
                opened: _TrackerRun = _RUNS[opening["tracker"]](opening["settings"], opening["ids"])
                run, answer = opened, {"ids": dict(opened.ids), "message": opened.message}
            elif line.strip():
                run.log(decode_record(line))
            else:
                is_finished = True
                run.finish(was_killed=False)
        except Exception as error:  # whatever the package raises is for the run's thread to judge
            answer = {"error": hide_secrets(describe_error(error), os.environ)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if run is not None and not is_finished:
        run.finish(was_killed=True)


def main() -> None:
    """Serve standard input; what packages print on standard output goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    stream: Any = _ScrubbedStream(sys.stderr)
    sys.stdout = sys.stderr = stream
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
