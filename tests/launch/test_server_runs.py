"""Whole runs whose engines are processes of their own: the same run, to the bit, also when one of them is killed."""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from tests.launch.small_run import Command, flags, miles, write_inputs
from tests.server_api.live_servers import PYTHON, STUB

from miles.cluster import process

EXACT = ("--parity", "exact")
TWO = ("--rollout-backend", "served", "--rollout-num-engines", "2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def inside(inputs, tmp_path_factory) -> Path:
    """The run with the engine in its own process."""
    run = tmp_path_factory.mktemp("runs") / "inside"
    done = miles("train", *flags(inputs, run, *EXACT, steps=4))
    assert done.returncode == 0, done.stderr
    return run


def same(run: Path, other: Path) -> None:
    """All that was measured, and the last weights."""
    assert (run / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    last = [max((each / "checkpoints").iterdir()) / "model.safetensors" for each in (run, other)]
    assert last[0].read_bytes() == last[1].read_bytes()


def accounted(run: Path) -> None:
    """Every ticket came back once, kept or dropped for a reason, and those that were kept were trained on once."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    finished = {event["ticket"]: event for event in events if event["event"] == "GroupFinished"}
    count = sum(event["event"] == "GroupFinished" for event in events)
    trained = [ticket for event in events if event["event"] == "BatchTaken" for ticket in event["tickets"]]
    assert sorted(finished) == list(range(count))
    assert sorted(trained) == sorted(ticket for ticket, event in finished.items() if event["kept"])
    assert all(event["reason"] for event in finished.values())


def server_of(run: Path, number: int) -> int:
    """The process of an engine: the child of the guard whose command names its port."""
    started = [line for line in (run / "logs" / f"engine-{number}.log").read_text().splitlines() if line[:4] == "--- "]
    port = started[-1].rpartition(" ")[2]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if port.encode() in words and b"serve" in words and os.fsencode(process.__file__) not in words:
                return int(entry.name)
    raise AssertionError(f"no process of engine {number} listens on {port}")


def test_a_run_that_is_stopped_while_an_engine_hangs_at_its_start_ends(inputs, tmp_path):
    run = tmp_path / "run"
    going = Command("train", *flags(inputs, run, *EXACT, *TWO, steps=4))
    assert going.pid is not None
    deadline, engine = time.monotonic() + 120, None
    while engine is None and time.monotonic() < deadline:
        with suppress(AssertionError, OSError, IndexError):
            engine = server_of(run, 0)
    assert engine is not None, "no engine was started"
    os.kill(engine, signal.SIGSTOP)
    going.wait_to_hear("on CPU")  # from here on a signal is a request to stop
    os.kill(going.pid, signal.SIGTERM)
    done = going.done()
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert "Traceback" not in done.stderr


def test_a_run_on_two_servers_one_of_which_is_killed_is_the_run_on_an_engine_inside(inputs, inside, tmp_path):
    run = tmp_path / "outside"
    going = Command("train", *flags(inputs, run, *EXACT, *TWO, steps=4))
    going.wait_to_hear("step 1/4")
    os.kill(server_of(run, 0), signal.SIGKILL)
    done = going.done()
    assert done.returncode == 0, done.stderr
    same(run, inside)
    accounted(run)
    reported = (run / "logs" / "engines.log").read_text().splitlines()
    assert any("engine 0 " in line and "restarting it (restart 1 of at most 5)" in line for line in reported)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tensor", "delta", "disk", "distributed"])
def test_every_transport_brings_the_same_weights(inputs, inside, tmp_path, transport):
    run = tmp_path / transport
    more = ("--update-weight-transport", transport, "--update-weight-buffer-size", "20000")
    done = miles("train", *flags(inputs, run, *EXACT, *TWO, *more, steps=4))
    assert done.returncode == 0, done.stderr
    same(run, inside)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_an_asynchronous_run_goes_on_when_a_server_is_killed(inputs, tmp_path, mode):
    run = tmp_path / "run"
    drifting = ("--max-weight-staleness", "2", "--pause-generation-mode", mode)
    going = Command("train", *flags(inputs, run, *TWO, *drifting, steps=8))
    going.wait_to_hear("step 2/8")
    os.kill(server_of(run, 1), signal.SIGKILL)
    done = going.done()
    assert done.returncode == 0, done.stderr
    accounted(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["staleness"] for row in rows if "staleness" in row) <= 2
    reported = (run / "logs" / "engines.log").read_text()
    assert (
        f"engine 1 keeps its in-flight requests during weight updates (--pause-generation-mode {mode})" in reported
    ) == (mode != "abort")


@pytest.mark.slow
def test_no_server_outlives_a_run_that_is_killed(inputs, tmp_path):
    run = tmp_path / "run"
    going = Command("train", *flags(inputs, run, *TWO, steps=50))
    going.wait_to_hear("1/50")
    pids = [server_of(run, number) for number in range(2)]
    assert going.pid is not None
    os.kill(going.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        assert time.monotonic() < deadline, "a server lives on"
        time.sleep(0.05)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tensor", "distributed", "disk"])
def test_a_run_on_stock_sglang_samples_what_the_trainer_computes(inputs, tmp_path, transport):
    run, python = tmp_path / "run", tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    more = ("--rollout-backend", "sglang", "--sglang-python", str(python), "--sglang-max-total-tokens", "4096")
    line = flags(inputs, run, *more, "--update-weight-transport", transport, "--parity-tolerance", "1e-4", steps=3)
    done = miles("train", *line, patience=900)
    assert done.returncode == 0, done.stderr
    accounted(run)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [value for row in rows for name, value in row.items() if name.startswith("parity") and "mean" in name]
    assert gaps and max(gaps) < 1e-5  # after each kind of update the servers had the trainer's very weights
