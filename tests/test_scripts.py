"""The launch scripts: each is planned with its own flags, and requirements.txt names extras that exist."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from tests.launch.small_run import write_inputs

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(file.name for file in (ROOT / "scripts").iterdir() if file.is_file() and file.name != "common.sh")
PLANNED = {
    "one_gpu.sh": ["rollout_batch_size 32 × n_samples_per_prompt 8"],
    "eight_gpus.sh": ["rollout_batch_size 128 × n_samples_per_prompt 8", "8 shard"],
    "disaggregated.sh": ["max_weight_staleness", "4 shard"],
    "two_nodes_ray.sh": ["runtime", "8 shard"],
    "slurm.sbatch": ["runtime", "8 shard"],
}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("world"))


def plan(script: str, world: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Run a script that only plans, on a tiny model and file."""
    environ = {"MODEL": str(world), "DATA": str(world / "train.jsonl"), "INPUT_KEY": "input", "LABEL_KEY": "label"}
    environ |= {"MILES_COMMAND": "plan", "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(
        ["bash", f"scripts/{script}", "--rollout-max-response-len", "8", *more],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", list(PLANNED))
def test_a_script_is_a_plan_that_holds(script: str, world: Path) -> None:
    done = plan(script, world)
    assert done.returncode == 0, done.stderr
    for text in PLANNED[script]:
        assert text in done.stdout


def test_flags_after_a_script_win(world: Path) -> None:
    done = plan("one_gpu.sh", world, "--rollout-batch-size", "16")
    assert "rollout_batch_size 16 ×" in done.stdout


def test_every_script_is_planned_or_starts_one_that_is() -> None:
    assert set(SCRIPTS) == {*PLANNED, "kuberay.yaml"}
    job = yaml.safe_load((ROOT / "scripts" / "kuberay.yaml").read_text())
    assert job["spec"]["entrypoint"].removeprefix("bash scripts/") in PLANNED
    workers = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert [group["rayStartParams"]["num-gpus"] for group in workers] == ["8"]


@pytest.mark.parametrize("script", [*PLANNED, "common.sh"])
def test_a_script_is_valid_shell(script: str) -> None:
    subprocess.run(["bash", "-n", f"scripts/{script}"], cwd=ROOT, check=True)


def test_requirements_install_this_project_with_extras_that_exist() -> None:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "-c constraints.txt"
    extras = lines[1].removeprefix("-e .[").removesuffix("]").split(",")
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras) <= set(known)
