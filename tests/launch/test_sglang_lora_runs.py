"""Whole runs whose adapters stock SGLang applies beside its weights (--no-lora-merge): parity, bytes sent, restarts."""

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import Command, flags, miles, write_inputs
from tests.server_api.live_servers import PYTHON, STUB
from tests.server_api.tiny import BLOCKS

from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

pytestmark = [pytest.mark.sglang, pytest.mark.slow]
LORA = ("--lora-rank", "4", "--lora-alpha", "16")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def build_line(inputs: Path, run: Path, *more: str, steps: int) -> list[str]:
    python = run.parent / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    sglang = ("--rollout-backend", "sglang", "--sglang-python", str(python), "--sglang-max-total-tokens", "4096")
    return flags(inputs, run, *sglang, *LORA, *more, steps=steps)


def read_rows(run: Path) -> list[dict]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def read_bytes(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    return [row["seconds"]["publish/bytes"] for row in rows if "publish/bytes" in row.get("seconds", {})]


def count_adapter_bytes(run: Path, size: int) -> int:
    tensors = load_file(max((run / "checkpoints").iterdir()) / "adapter" / "adapter_model.safetensors")
    return sum(tensor.numel() * size for tensor in tensors.values())


def find_server(inputs: Path) -> int:
    """The process of the server that has these inputs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            words = path.read_bytes().split(b"\0")
            if b"sglang.launch_server" in words and str(inputs).encode() in words:
                return int(path.parent.name)
    raise AssertionError("no server runs")


def test_only_adapters_are_sent_and_a_server_that_died_gets_its_adapter_before_requests(inputs, tmp_path):
    run = tmp_path / "run"
    line = build_line(inputs, run, "--no-lora-merge", "--max-weight-staleness", "1", steps=6)
    command = Command("train", *line)
    command.wait_to_hear("step 2/6")
    os.kill(find_server(inputs), signal.SIGKILL)
    done = command.done(900)
    assert done.returncode == 0, done.stderr
    compared = [row["parity_max_abs"] for row in read_rows(run) if "parity_max_abs" in row]
    assert compared and max(compared) < 1e-4
    assert set(read_bytes(run)) == {count_adapter_bytes(run, 4)}
    log = (run / "logs" / "engines.log").read_text()
    assert "restarting it" in log and "engine 0 is back" in log
    loaded = [line for line in (run / "logs" / "engine-0.log").read_text().splitlines() if "[LORA-CHECK]" in line]
    assert len(loaded) >= 7 and all("tensors match" in line for line in loaded)


def test_adapters_are_applied_beside_an_fp8_base(tmp_path):
    inputs, run = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    config = {**read_config(inputs), **BLOCKS}
    decoder = hf.init_random(spec_from_config(config), seed=1, device="cpu", dtype=torch.float32)
    hf.export(decoder, inputs, like=None, config=config)
    precision = ("--train-precision", "fp8", "--rollout-dtype", "bfloat16")
    done = miles("train", *build_line(inputs, run, *precision, steps=3), patience=900)
    assert done.returncode == 0, done.stderr
    rows = read_rows(run)
    assert all(row["parity_mean_abs"] < 0.05 and row["grad_norm"] > 0 for row in rows)
    assert set(read_bytes(run)) == {count_adapter_bytes(run, 2)}
