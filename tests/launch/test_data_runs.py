"""Whole runs over mixtures, saved data sets and curricula: continued, they read what they would have read."""

import json
import signal

import pytest
from tests.launch.small_run import everything, flags, miles, write_inputs
from tests.rollout.dataset_files import write_parts

from miles.core.protocols import CurriculumState
from miles.rollout.data.mixture import PART_ID_STRIDE

STEPS = 4


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write_parts(folder / "saved", rows[:9], shards=2)
    with (folder / "spoilt.jsonl").open("w") as file:
        file.writelines(f"{json.dumps(row)}\nspoilt\n" for row in rows[9:16])
    return folder


def command(inputs, run, words, *more):
    argv = flags(inputs, run, *more, steps=STEPS)
    at = argv.index("--prompt-data")
    return ["train", *argv[: at + 1], *words, *argv[at + 2 :]]


def easier_when_it_goes_badly(lesson: CurriculumState) -> dict[str, float]:
    """Weights that hang on every reward so far."""
    seen = {
        portion.name: [lesson.stats[p.id].mean for p in portion.prompts if p.id in lesson.stats]
        for portion in lesson.parts
    }
    return {name: 0.2 + sum(means) / (len(means) or 1) for name, means in seen.items()}


def drawn(run):
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [e["group"]["prompt"] for e in events if e["event"] == "GroupFinished"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("--curriculum-path", "unsolved_first"),
        ("--curriculum-path", "tests.launch.test_data_runs:easier_when_it_goes_badly"),
    ],
    ids=["mixture", "list", "weights"],
)
def test_a_killed_run_over_several_parts_continues_to_the_bit(inputs, tmp_path, more):
    words = [f"{inputs}/saved*0.3", f"{inputs}/train.jsonl@[:12]*0.7"]
    calm, run = tmp_path / "calm", tmp_path / "run"
    assert miles(*command(inputs, calm, words, *more)).returncode == 0
    killed = miles(*command(inputs, run, words, *more), kill_at="miles.train.optim.optimizer:Optimizer.step:6")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = miles(*command(inputs, run, words, *more))
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)
    parts = [index // PART_ID_STRIDE for index in drawn(calm)]
    assert set(parts) == {0, 1}
    if not more:
        assert all(abs(0.7 * n - sum(parts[:n])) <= 0.5 + 1e-9 for n in range(len(parts)))


def test_bad_rows_stop_a_run_or_are_counted_where_it_says_so(inputs, tmp_path):
    words = [f"{inputs}/spoilt.jsonl"]
    stopped = miles(*command(inputs, tmp_path / "run", words))
    assert stopped.returncode == 2
    assert "spoilt.jsonl, line 2: this is not JSON" in stopped.stderr and "Traceback" not in stopped.stderr
    done = miles(*command(inputs, tmp_path / "run", words, "--skip-bad-rows"))
    assert done.returncode == 0, done.stderr
    assert "7 of 14 rows of" in done.stdout + done.stderr
    assert set(drawn(tmp_path / "run")) <= {0, 2, 4, 6, 8, 10, 12}
