"""--profile-target rollout with engines that are servers: each writes its trace to the run directory."""

import gzip
import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, miles, write_inputs
from tests.server_api.live_servers import PYTHON, STUB

PROFILE = (
    "--use-pytorch-profiler",
    "--profile-step-start",
    "2",
    "--profile-step-end",
    "3",
    "--profile-target",
    "rollout",
)
SHORT = ("--num-steps-per-rollout", "1", "--lr-warmup-iters", "0", "--no-eval-interval")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def read_operators(path: Path) -> set[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return {str(event.get("name")) for event in events}


def test_each_server_writes_the_trace_of_the_step(inputs: Path, tmp_path: Path):
    run = tmp_path / "run"
    two = ("--rollout-backend", "served", "--rollout-num-engines", "2")
    done = miles("train", *flags(inputs, run, *SHORT, *PROFILE, *two, steps=3))
    assert done.returncode == 0, done.stderr
    paths = sorted((run / "profiles").iterdir())
    assert [path.name.rpartition("-rollout-")[0] for path in paths] == ["step-000002"] * 2
    assert [path.name.partition("-rollout-")[2][:8] for path in paths] == ["engine-0", "engine-1"]
    assert any("aten::embedding" in read_operators(path) for path in paths)


@pytest.mark.sglang
def test_stock_sglang_writes_the_trace_of_the_step(inputs: Path, tmp_path: Path):
    run, python = tmp_path / "run", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    more = ("--rollout-backend", "sglang", "--sglang-python", str(python), "--sglang-max-total-tokens", "16384")
    done = miles("train", *flags(inputs, run, *SHORT, *PROFILE, *more, steps=3), patience=1200)
    assert done.returncode == 0, done.stderr
    (path,) = (run / "profiles").iterdir()
    assert path.name.startswith("step-000002-rollout-engine-0") and path.name.endswith("TP-0.trace.json.gz")
    assert any(name.startswith("aten::") for name in read_operators(path))
