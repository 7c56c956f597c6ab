"""Experiment trackers: the metrics of a run in Weights & Biases and MLflow, and its key nowhere."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, miles, write_inputs

from miles.launch.main import main

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


def test_an_offline_wandb_run_has_every_metric_and_is_continued(world: Path, tmp_path: Path):
    pytest.importorskip("wandb")
    run = tmp_path / "run"
    more = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g", "--wandb-key", KEY)
    train(world, run, *more)
    ids = json.loads((run / "trackers.json").read_text())
    assert ids["wandb_group"].startswith("g_")
    (data,) = run.glob("wandb/offline-run-*/run-*.wandb")
    assert ids["wandb_run_id"] in data.name
    logged = data.read_bytes()
    assert b"train/reward" in logged and b"eval/heldout/reward" in logged
    assert KEY.encode() not in b"".join(p.read_bytes() for p in run.rglob("*") if p.is_file())
    done = miles("train", *flags(world, run, *more, steps=3))
    assert done.returncode == 0, done.stderr
    assert len(list(run.glob(f"wandb/offline-run-*-{ids['wandb_run_id']}"))) == 2


def test_an_mlflow_run_has_every_metric_and_is_continued(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run, store = tmp_path / "run", f"file://{tmp_path / 'mlruns'}"
    more = ("--use-mlflow", "--mlflow-tracking-uri", store, "--mlflow-experiment-name", "e")
    for steps in (2, 3):
        assert main(["train", *flags(world, run, *more, steps=steps)]) == 0
    client = mlflow.MlflowClient(store)
    (experiment,) = client.search_experiments(filter_string="name = 'e'")
    (found,) = client.search_runs([experiment.experiment_id])
    rewards = client.get_metric_history(found.info.run_id, "train/reward")
    assert sorted({point.step for point in rewards}) == [1, 2, 3]
    assert found.data.params["rollout_batch_size"] == "4"


def _is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None
