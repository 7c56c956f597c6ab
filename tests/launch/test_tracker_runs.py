"""Experiment trackers of a whole run: every metric in each of them, and no key anywhere."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, miles, write_inputs
from tests.observe.test_tracker_packages import free_port
from tests.observe.trace_format import check_trace_folder
from tests.observe.wandb_file import read_history

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


def train(world: Path, run: Path, *more: str) -> str:
    done = miles("train", *flags(world, run, *more, steps=2))
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_key_on_the_command_line_is_written_nowhere(world: Path, tmp_path: Path):
    line = flags(world, tmp_path / "run", "--use-wandb", "--wandb-key", KEY, "--wandb-mode", "offline")
    for output in ("--all", "--json"):
        done = miles("plan", *line, output)
        assert done.returncode == 0, done.stderr
        assert KEY not in done.stdout + done.stderr and "***" in done.stdout


def test_a_missing_package_is_named_before_the_model_is_loaded(world: Path, tmp_path: Path):
    if _is_installed("wandb"):
        pytest.skip("wandb is installed")
    done = miles("train", *flags(world, tmp_path / "run", "--use-wandb"))
    assert done.returncode == 2
    assert "--use-wandb needs the package wandb" in done.stderr


def test_a_key_in_a_file_is_refused_and_not_repeated(world: Path, tmp_path: Path):
    (tmp_path / "recipe.toml").write_text(f'wandb_key = "{KEY}"\n')
    done = miles("plan", str(tmp_path / "recipe.toml"), *flags(world, tmp_path / "run", "--use-wandb"))
    assert done.returncode == 2 and "wandb_key" in done.stderr and KEY not in done.stdout + done.stderr


def test_a_run_serves_prometheus_and_writes_tensorboard_and_says_where(world: Path, tmp_path: Path):
    run = tmp_path / "run"
    said = train(world, run, "--use-tensorboard", "--metrics-port", "0", "--tracker-samples", "3")
    assert f"TensorBoard: tensorboard --logdir {run / 'tensorboard'}" in said
    assert "Prometheus: http://127.0.0.1:" in said and "not sent" not in said
    check_trace_folder(run / "trace")


@pytest.mark.trackers
def test_all_trackers_at_once_have_every_step_of_a_run_that_is_continued(world: Path, tmp_path: Path, monkeypatch):
    import mlflow
    from tests.observe.test_tracker_packages import read_trackio

    monkeypatch.chdir(tmp_path)
    run, store = tmp_path / "run", f"sqlite:///{tmp_path / 'mlflow.db'}"
    more = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g")
    more += ("--use-mlflow", "--mlflow-tracking-uri", store, "--mlflow-experiment-name", "e", "--use-tensorboard")
    more += ("--use-trackio", "--trackio-dir", str(tmp_path / "trackio"), "--metrics-port", "0")
    more += ("--tracker-samples", "3", "--tracker-samples-interval", "1")
    more += ("--otlp-endpoint", f"http://127.0.0.1:{free_port()}")  # nobody listens there
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for steps in (2, 3):
        done = miles("train", *flags(world, run, *more, "--wandb-key", KEY, steps=steps))
        assert "set WANDB_API_KEY instead" in done.stdout and KEY not in done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
        assert "The tracker opentelemetry failed" in done.stdout and done.stdout.count("not sent") == 1
    ids = json.loads((run / "trackers.json").read_text())
    assert sorted(ids) == ["mlflow_run_id", "trackio_run_name", "wandb_group", "wandb_run_id"]
    files = sorted(run.glob(f"wandb/offline-run-*-{ids['wandb_run_id']}/*.wandb"))
    wandb_rows = [row for path in files for row in read_history(path) if "train/reward" in row]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    expected = {row["step"]: row["reward"] for row in metrics if row["kind"] == "train"}
    assert {json.loads(row["step"]): json.loads(row["train/reward"]) for row in wandb_rows} == expected
    points = mlflow.MlflowClient(store).get_metric_history(ids["mlflow_run_id"], "train/reward")
    assert {point.step: point.value for point in points} == expected
    logs = read_trackio(tmp_path / "trackio")[ids["trackio_run_name"]]
    assert {row["step"]: row["train/reward"] for row in logs if "train/reward" in row} == expected
    assert KEY.encode() not in b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
