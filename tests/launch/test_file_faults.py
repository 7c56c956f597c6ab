"""A run whose file operations fail ends with one sentence, and continued without the fault it is the calm run."""

import os
import shutil
from pathlib import Path

import pytest
from tests.launch.file_faults import ERRORS, FileFaults, inject
from tests.launch.small_run import flags, write_inputs

from miles.launch.commands import train as train_command
from miles.launch.main import main

LAST = 400
"""More operations than the run makes."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(train_command, "plot_curves", lambda *args: False)


def command(inputs: Path, run: Path) -> list[str]:
    more = ("--keep-checkpoints", "1", "--save-interval", "1", "--view", "none")
    argv = flags(inputs, run, steps=2)
    for flag, count in (("--save-interval", 2), ("--eval-interval", 2), ("--eval-prompt-data", 3), ("--view", 2)):
        at = argv.index(flag)
        del argv[at : at + count]
    for flag in ("--rollout-batch-size", "--n-samples-per-prompt"):
        argv[argv.index(flag) + 1] = "2"
    return ["train", *argv, *more]


@pytest.fixture(scope="module")
def calm(inputs, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "calm"
    train_command.plot_curves, plot = (lambda *args: False), train_command.plot_curves
    assert main(command(inputs, run)) == 0
    train_command.plot_curves = plot
    return run


def fail_and_continue(inputs: Path, calm: Path, run: Path, number: int, code: int, capsys) -> bool:
    """Let operation ``number`` fail; whether the run makes so many."""
    faults = FileFaults(run, number, code)
    with inject(faults):
        status = main(command(inputs, run))
    error = capsys.readouterr().err
    if not faults.failed:
        assert status == 0
        return False
    reported = f"{number}: {faults.failed}: {error}"
    assert "Traceback" not in error, reported
    if status != 0:  # a file that is not needed, such as a stack dump, may fail
        assert status == 1, reported
        lines = error.strip().splitlines()
        assert len(lines) == 1 and lines[0].startswith("miles: "), reported
        assert os.strerror(code) in error, reported
        assert main(command(inputs, run)) == 0, reported + capsys.readouterr().err
        capsys.readouterr()
    assert (run / "metrics.jsonl").read_bytes() == (calm / "metrics.jsonl").read_bytes(), reported
    assert (run / "events.jsonl").read_bytes() == (calm / "events.jsonl").read_bytes(), reported
    return True


@pytest.mark.parametrize("number", [1, 6, 12])
def test_a_file_operation_that_fails_at_the_start_is_one_sentence(inputs, tmp_path, capsys, number):
    faults = FileFaults(tmp_path / "run", number)
    with inject(faults):
        assert main(command(inputs, tmp_path / "run")) == 1
    assert faults.failed
    error = capsys.readouterr().err
    assert error.startswith("miles: ") and len(error.strip().splitlines()) == 1
    assert "No space left on device" in error


def test_a_run_directory_below_a_file_is_one_sentence(inputs, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(command(inputs, tmp_path / "file" / "run")) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"miles: the run directory {tmp_path / 'file' / 'run'} cannot be used: Not a directory;")
    assert len(error.strip().splitlines()) == 1


@pytest.mark.parametrize("number", [31, 75, 136])
def test_a_run_whose_file_operation_failed_is_continued_as_if_it_had_not(inputs, calm, tmp_path, capsys, number):
    assert fail_and_continue(inputs, calm, tmp_path / "run", number, ERRORS[number % len(ERRORS)], capsys)


@pytest.mark.parametrize("stride", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_file_operation_may_fail(inputs, calm, tmp_path, capsys, stride):
    for number in range(1, LAST, stride):
        run = tmp_path / f"run-{number}"
        if not fail_and_continue(inputs, calm, run, number, ERRORS[number % len(ERRORS)], capsys):
            return
        shutil.rmtree(run)
    pytest.fail("the run makes more operations than this test counts")
