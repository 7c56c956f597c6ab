"""The process that compiles kernels: when it is started, what it reports, and that a run never depends on it."""

import os
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from miles.launch.precompile import kernels, process
from miles.launch.precompile.process import Precompilation, find_marker, start_precompilation
from miles.launch.read_config import read_without_rules


@pytest.fixture
def config(tmp_path, monkeypatch):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    gpu = tmp_path / "nvidiactl"
    gpu.touch()
    monkeypatch.setattr(process, "_GPU", gpu)
    monkeypatch.setattr(process, "_MIN_CORES", 1)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return read_without_rules(["--hf-checkpoint", str(model)])


def _wait_for_marker(marker: Path) -> bool:
    until = time.monotonic() + 60
    while not marker.exists() and time.monotonic() < until:
        os.sched_yield()
    return marker.exists()


def test_a_run_that_compiled_everything_is_not_compiled_for_again(config, monkeypatch):
    monkeypatch.setattr(kernels, "compile_run", lambda config, on_ready: bool(on_ready()))
    marker = find_marker(config)
    assert marker is not None and not marker.exists()

    started = start_precompilation(config)
    assert started is not None and started.wait(60)
    assert _wait_for_marker(marker)
    assert start_precompilation(config) is None
    assert start_precompilation(replace(config, native=replace(config.native, engine_page_size=32))) is not None


def test_the_marker_does_not_depend_on_the_place_of_the_model(config, tmp_path):
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "config.json").write_text("{}")
    moved = replace(config, models=replace(config.models, hf_checkpoint=str(tmp_path / "moved")))
    assert find_marker(moved) == find_marker(config)
    (tmp_path / "moved" / "config.json").write_text('{"model_type": "qwen3"}')
    assert find_marker(moved) != find_marker(config)


def test_a_process_that_fails_says_why_and_holds_nothing_up(config, monkeypatch):
    def fail(config: object, on_ready: object) -> bool:
        raise RuntimeError("no such layer")

    monkeypatch.setattr(kernels, "compile_run", fail)
    marker = find_marker(config)
    assert marker is not None
    started = Precompilation(config, marker)
    assert started.wait(60)
    assert marker.with_suffix(".log").read_text() == "RuntimeError: no such layer\n"
    assert not marker.exists()


KILLED = """
import os, sys, time
from pathlib import Path
from miles.kernels.runtime.fake_gpu import Target
from miles.launch.precompile import kernels, process
from miles.launch.precompile.compiler import ParallelCompiler

def compile_run(config, on_ready):
    sizes = {"warp_size": 32, "capability": (9, 0), "sms": 132, "shared_memory": 227 << 10}
    target = Target(family="cuda", arch="90", gpus="H100", **sizes)
    compiler = ParallelCompiler(target, workers=2)
    compiler._fork(lambda: (Path(sys.argv[2]).touch(), on_ready(), time.sleep(1e6)))
    time.sleep(1e6)

kernels.compile_run = compile_run
started = process.Precompilation(None, Path(sys.argv[1]))
print(started.wait(60) and Path(sys.argv[2]).exists(), flush=True)
time.sleep(1e6)
"""


def test_it_ends_with_a_run_that_is_killed(tmp_path):
    """A pipe ends when the run, what compiles for it and that one's children have all ended."""
    reader, writer = os.pipe()
    line = [sys.executable, "-c", KILLED, str(tmp_path / "cache" / "key.done"), str(tmp_path / "compiles")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, pass_fds=[writer]) as run:
        os.close(writer)
        assert run.stdout is not None and run.stdout.readline() == "True\n"
        run.kill()
    readable, _, _ = select.select([reader], [], [], 60)
    assert readable and os.read(reader, 1) == b""
    os.close(reader)


def test_a_run_waits_for_the_first_kernels_only_so_long(config, monkeypatch):
    reader, writer = os.pipe()

    def compile_run(config: object, on_ready: object) -> bool:
        return os.read(reader, 1) == b""

    monkeypatch.setattr(kernels, "compile_run", compile_run)
    marker = find_marker(config)
    assert marker is not None
    started = Precompilation(config, marker)
    assert not started.wait(0.01)
    os.write(writer, b".")
    assert started.wait(60)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("case", ["no GPU", "CPU", "few cores", "other engine"])
def test_it_is_not_started_where_it_cannot_help(config, monkeypatch, case):
    monkeypatch.setattr(kernels, "compile_run", lambda config, on_ready: pytest.fail("it was started"))
    if case == "no GPU":
        monkeypatch.setattr(process, "_GPU", Path("/nowhere"))
    elif case == "CPU":
        config = replace(config, cluster=replace(config.cluster, device="cpu"))
    elif case == "few cores":
        monkeypatch.setattr(process, "_MIN_CORES", 1 << 20)
    else:
        config = replace(config, sglang=replace(config.sglang, rollout_backend="sglang"))
    assert start_precompilation(config) is None
