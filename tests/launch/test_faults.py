"""Runs that lose a rank of the trainer, or themselves: they end as if nothing had happened, or say why they cannot."""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.launch.small_run import Command, everything, flags, write_inputs

from miles.core.protocols import Engine, SamplingParams
from miles.core.types import Prompt, Trajectory

STRUCK = [
    pytest.param(signal.SIGKILL, id="killed"),
    pytest.param(signal.SIGSTOP, id="frozen", marks=pytest.mark.slow),  # it is waited for until it counts as lost
]
PAIR = ("--actor-num-gpus-per-node", "2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs, tmp_path_factory) -> Path:
    """The run of two ranks that nothing happens to."""
    run = tmp_path_factory.mktemp("runs") / "calm"
    done = Command("train", *flags(inputs, run, *PAIR)).done()
    assert done.returncode == 0, done.stderr
    return run


def children(parent: int | None) -> Iterator[tuple[int, bytes]]:
    """The processes that ``parent`` started, with their words."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    yield int(entry.name), (entry / "cmdline").read_bytes()


def child_of(parent: int | None, word: bytes) -> int:
    """The one among them that was started with ``word``."""
    return next(pid for pid, words in children(parent) if word in words)


RANK, RUN = b"spawn_main", b"miles.launch.main"


@pytest.mark.parametrize("number", STRUCK)
def test_a_lost_rank_is_replaced_and_the_run_is_the_calm_one_to_the_bit(inputs, calm, tmp_path, number):
    run = tmp_path / "run"
    going = Command("train", *flags(inputs, run, *PAIR, "--heartbeat-timeout", "15"))
    going.wait_to_hear("step 3/6")
    os.kill(child_of(going.pid, RANK), number)
    done = going.done()
    assert done.returncode == 0, done.stderr
    why = "ended with SIGKILL" if number == signal.SIGKILL else "sent no heartbeat for 15 s"
    assert why in done.stdout
    assert "are restarted from step-000002" in done.stdout or "are restarted from step-000004" in done.stdout
    assert everything(run) == everything(calm)


@pytest.mark.slow  # two lives of a run
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_supervised_run_that_is_lost_goes_on_to_the_same_end(inputs, calm, tmp_path, number):
    run = tmp_path / "run"
    going = Command("train", *flags(inputs, run, *PAIR, "--max-restarts", "2", "--heartbeat-timeout", "15"))
    going.wait_to_hear("step 3/6")
    os.kill(child_of(going.pid, RUN), number)
    done = going.done()
    assert done.returncode == 0, done.stderr
    why = "was killed by SIGKILL" if number == signal.SIGKILL else "sent no heartbeat for 15 s"
    assert f"miles: the run {why}" in done.stderr
    assert "it is restarted in 1 s (restart 1 of at most 2 without a new checkpoint)" in done.stderr
    assert everything(run) == everything(calm)


async def never(prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
    """An answer that nobody ever hears."""
    await asyncio.Event().wait()
    raise AssertionError


def test_a_run_that_stands_still_says_who_waits_for_whom(inputs, tmp_path):
    run = tmp_path / "run"
    more = ("--stall-timeout", "10", "--reward-timeout", "1", "--skip-eval-before-train")
    line = flags(inputs, run, *PAIR, *more, "--custom-generate-function-path", f"{__name__}:never")
    done = Command("train", *line).done()
    assert done.returncode == 1
    assert "step 1 waited 10 s for the next group and none finished" in done.stderr
    assert "the stacks of all processes are in" in done.stderr
    reported = (run / "logs" / "stall-1.txt").read_text()
    assert "step 1 waits for its next group (0 of 4 are done)" in reported
    assert "ticket 0, prompt" in reported
    assert "the trainer rank 1 (process" in reported
    assert "in never" in reported  # the task that hangs
    assert "in receive" in reported  # what the rank is in
