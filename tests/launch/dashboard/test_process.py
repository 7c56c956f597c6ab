"""The dashboard beside a run: it prints its address, answers while the run goes on, and ends with it."""

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.launch.small_run import flags, miles, write_inputs
from tests.observe.dashboard.example_runs import write_run

from miles.launch.dashboard.process import start_dashboard
from miles.observe.config import ObserveConfig
from miles.observe.log_reader import read_rows

SECONDS = 60.0


class Notes:
    """The notes of a run, and a wait for the first."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._arrived = threading.Event()

    def __call__(self, text: str) -> None:
        self.lines.append(text)
        self._arrived.set()

    def first(self) -> str:
        assert self._arrived.wait(SECONDS)
        return self.lines[0]


def test_it_answers_at_the_address_it_prints_and_ends_with_the_run(tmp_path: Path):
    run, notes = write_run(tmp_path / "one"), Notes()
    process = start_dashboard(ObserveConfig(dashboard=True), run, notes)
    assert process is not None
    try:
        address = notes.first().removeprefix("Dashboard at ")
        with urllib.request.urlopen(f"{address}api/runs", timeout=SECONDS) as response:
            assert json.load(response)["runs"][0]["name"] == "one"
    finally:
        process.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{address}api/runs", timeout=SECONDS)


def test_a_run_goes_on_when_it_cannot_start(tmp_path: Path):
    run, notes = write_run(tmp_path / "one"), Notes()
    process = start_dashboard(ObserveConfig(dashboard=True, dashboard_bind_host="203.0.113.1"), run, notes)
    assert process is not None
    assert "the run goes on without it: --host 203.0.113.1" in notes.first()
    process.close()


def test_no_process_is_started_unless_asked(tmp_path: Path):
    notes = Notes()
    assert start_dashboard(ObserveConfig(), tmp_path, notes) is None
    assert notes.lines == []


def test_a_run_prints_the_address_of_its_dashboard_and_ends_as_without_it(tmp_path: Path):
    inputs = write_inputs(tmp_path / "inputs")
    done = miles("train", *flags(inputs, tmp_path / "run", "--dashboard", steps=2))
    assert done.returncode == 0, done.stderr
    assert read_rows(tmp_path / "run" / "metrics.jsonl").series("train", "reward")[0] == [1, 2]
    assert "miles view" in done.stdout
