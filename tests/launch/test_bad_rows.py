"""Whole runs over data with a row that cannot be used: found at the start, or dropped in its turn."""

import json
from pathlib import Path

import pytest
from tests.launch.small_run import flags, write_inputs

from miles.launch.commands import train as train_command
from miles.launch.main import main


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    monkeypatch.setattr(train_command, "plot_curves", lambda *args: False)


def write_rows(inputs: Path, folder: Path, *, bad: str, at: int) -> Path:
    """The words of the inputs with one prompt replaced."""
    rows = [json.loads(line) for line in (inputs / "train.jsonl").read_text().splitlines()]
    rows[at]["input"] = bad
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(inputs: Path, data: Path, run: Path, *more: str) -> list[str]:
    argv = flags(inputs, run, *more, steps=3)
    argv = [word for word in argv if word != "--rollout-shuffle"]
    argv[argv.index("--prompt-data") + 1] = str(data)
    return ["train", *argv]


def finished(run: Path) -> list[tuple[int, bool, str]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(e["group"]["prompt"], e["kept"], e["reason"]) for e in events if e["event"] == "GroupFinished"]


def test_a_prompt_longer_than_the_context_is_found_before_the_model_is_loaded(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("miles.launch.build.run.build_stack", lambda *args, **kwargs: pytest.fail("loaded"))
    data = write_rows(inputs, tmp_path, bad="a" * 500, at=20)
    assert main(command(inputs, data, tmp_path / "run")) == 1
    error = capsys.readouterr().err
    assert "rows.jsonl: prompt 20 has 5" in error
    assert "--skip-bad-rows" in error
    assert "Traceback" not in error


def test_a_run_that_met_a_bad_row_goes_on_with_skip_bad_rows(inputs, tmp_path, capsys):
    data = write_rows(inputs, tmp_path, bad="a" * 500, at=10)
    run = tmp_path / "run"
    assert main(command(inputs, data, run, "--check-rows", "0")) == 1
    error = capsys.readouterr().err
    assert "Prompt 10 has 5" in error
    assert "go on without such prompts with --skip-bad-rows" in error
    assert main(command(inputs, data, run, "--skip-bad-rows")) == 0
    assert "1 of 24 prompts of" in capsys.readouterr().out
    assert (10, False, "bad_row") in finished(run)
    assert main(command(inputs, data, tmp_path / "calm", "--skip-bad-rows")) == 0
    assert finished(run) == finished(tmp_path / "calm")
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "calm" / "metrics.jsonl").read_bytes()
