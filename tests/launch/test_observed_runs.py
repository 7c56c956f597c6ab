"""What a run writes about itself: the trainer's tokens, traces of every process, profiles; and its stacks on demand."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.launch.small_run import flags, write_inputs

from miles.launch.main import main
from miles.models.accounting.params import forward_flops_per_token, weight_bytes
from miles.models.resolve import resolve_spec
from miles.observe.log_reader import read_rows
from miles.observe.rollouts import read_step, read_token_stats


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def train(inputs: Path, run: Path, *more: str) -> Path:
    assert (
        main(["train", *flags(inputs, run, "--num-steps-per-rollout", "1", "--lr-warmup-iters", "0", *more, steps=2)])
        == 0
    )
    return run


def read_spans(path: Path) -> dict[str, list[dict]]:
    """The spans of a trace by the name of their track."""
    records = json.loads(path.read_text())
    names = {(r["pid"], r["tid"]): r["args"]["name"] for r in records if r["name"] == "thread_name"}
    found: dict[str, list[dict]] = {}
    for record in (r for r in records if r["ph"] == "X"):
        found.setdefault(names[record["pid"], record["tid"]], []).append(record)
    return found


def check_tokens(run: Path) -> None:
    """The differences of engine and trainer in the files are those that the parity metrics are computed from."""
    _, gaps = read_rows(run / "metrics.jsonl").series("train", "parity_mean_abs")
    for step, gap in enumerate(gaps, 1):
        rows = read_step(run / "rollouts" / f"step-{step:06d}.parquet")
        trainer = read_token_stats(run / "rollouts" / "trainer" / f"step-{step:06d}.parquet")
        found = [trainer[row["ticket"], row["trajectory"], row["branch"]] for row in rows]
        engine = np.concatenate([row["logprobs"][row["authors"] == 1] for row in rows])
        own = np.concatenate([each[0][row["authors"] == 1] for row, each in zip(rows, found, strict=True)])
        assert np.abs(engine - own).mean() == pytest.approx(gap, rel=1e-3, abs=1e-9)
        entropies = np.concatenate([each[1][row["authors"] == 1] for row, each in zip(rows, found, strict=True)])
        assert (entropies > 0).all() and (entropies < np.log(64)).all()


def test_a_run_records_tokens_groups_engines_and_profiles(inputs: Path, tmp_path: Path):
    profile = ["--use-pytorch-profiler", "--profile-step-start", "2", "--profile-step-end", "3"]
    profile += ["--profile-target", "train_actor", "rollout", "--gauge-interval", "0.02"]
    run = train(inputs, tmp_path / "run", *profile)
    check_tokens(run)
    rows = [row for step in (1, 2) for row in read_step(run / "rollouts" / f"step-{step:06d}.parquet")]
    groups = read_spans(run / "trace" / "groups.json")
    spans = {span["args"]["ticket"]: span for each in groups.values() for span in each if "generate" in span["name"]}
    for row in rows:
        assert spans[row["ticket"]]["ts"] / 1e6 <= row["started"] + 1e-5
        assert row["generate_seconds"] <= spans[row["ticket"]]["dur"] / 1e6 + 1e-5 and row["grade_seconds"] >= 0
    assert {span["name"] for span in read_spans(run / "trace" / "engines.json")["engine 0"]} >= {"generate"}
    timings = read_rows(run / "timings.jsonl")
    assert len(timings.select("group")) >= 8 and min(timings.series("train", "perf/train_tflops")[1]) > 0
    assert sorted(path.name for path in (run / "profiles").iterdir()) == [
        "step-000002-rollout-engines.json.gz",
        "step-000002-train_actor-rank-0.json.gz",
    ]
    for path, wanted in zip(sorted((run / "profiles").iterdir()), ("aten::embedding", "aten::mm"), strict=True):
        names = {record.get("name") for record in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}
        assert any(wanted in str(name) for name in names), path.name


def test_the_limit_of_each_step_is_that_of_the_tokens_it_had(inputs: Path, tmp_path: Path):
    run = train(inputs, tmp_path / "run")
    stored = json.loads((run / "limits.json").read_text())
    peak = stored["device"]["peak"]
    assert stored["device"]["source"] == "measured when the run started" and peak["link"] is None
    assert stored["seconds"] == pytest.approx(sum(part["seconds"] for part in stored["parts"]))
    spec = resolve_spec(str(inputs), "auto")
    for row in read_rows(run / "timings.jsonl").select("train"):
        rows = read_step(run / "rollouts" / f"step-{row.step:06d}.parquet")
        lengths = [len(each["tokens"]) for each in rows]
        context = sum(length**2 for length in lengths) / 2 / sum(lengths)
        flops = 3 * sum(lengths) * forward_flops_per_token(spec, context)
        seconds, longest = row.values, max(int((each["authors"] == 1).sum()) for each in rows)
        assert seconds["limit/train/forward_backward/compute"] == pytest.approx(flops / peak["flops"], rel=1e-6)
        read = longest * weight_bytes(spec, "float32") / peak["bandwidth"]  # and of the KV cache, much less
        decode = sum(value for name, value in seconds.items() if name.startswith("limit/rollout/decode/"))
        assert read <= decode < seconds["rollout"]
        assert sum(value for name, value in seconds.items() if name.startswith("limit/")) < seconds["step"]
    assert main(["plan", str(run / "config.toml"), "--json"]) == 0  # the plan knows the CPU that the run measured


def test_what_is_not_wanted_is_not_written(inputs: Path, tmp_path: Path):
    run = train(inputs, tmp_path / "run", "--disable-save-trainer-logprobs", "--gauge-interval", "0")
    assert not (run / "rollouts" / "trainer").exists() and not (run / "trace" / "engines.json").exists()
    assert not (run / "profiles").exists()


def test_every_rank_has_its_lane_and_its_tokens(inputs: Path, tmp_path: Path):
    run = train(inputs, tmp_path / "run", "--actor-num-gpus-per-node", "2")
    check_tokens(run)
    tracks = read_spans(run / "trace" / "loop.json")
    assert {"rank 0", "rank 1"} <= set(tracks)
    for rank in ("rank 0", "rank 1"):
        names = [span["name"] for span in tracks[rank]]
        assert names.count("train/optimize") == 2 and names.count("wait for rollout 2") == 1
    phases = {span["name"]: (span["ts"], span["ts"] + span["dur"]) for span in tracks["loop"]}
    own = next(span for span in tracks["rank 1"] if span["name"] == "train/optimize")
    assert phases["train 1"][0] <= own["ts"] and own["ts"] + own["dur"] <= phases["train 1"][1]  # one clock


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--profile-target", "rollout"], "--use-pytorch-profiler"),
        (["--use-pytorch-profiler", "--profile-step-start", "5", "--profile-step-end", "5"], "must be above"),
        (["--use-pytorch-profiler", "--profile-target", "everything"], "train_overall"),
        (["--record-memory-history"], "--device cpu has not"),
        (["--memory-snapshot-num-steps", "3"], "--record-memory-history"),
    ],
)
def test_options_of_profiles_that_do_not_fit_are_refused(inputs: Path, tmp_path: Path, capsys, given, expected):
    assert main(["train", *flags(inputs, tmp_path / "run", *given)]) == 2
    assert expected in capsys.readouterr().err


_CHILD = """
import sys
from miles.cluster import stack_dump

def wait_for_the_test():
    print("ready", flush=True)
    sys.stdin.readline()

stack_dump.register_process("trainer rank 1")
wait_for_the_test()
"""


def test_the_stacks_of_a_live_run_are_printed(tmp_path: Path, capsys):
    folder = tmp_path / "logs" / "stacks"
    folder.mkdir(parents=True)
    (tmp_path / "config.toml").write_text("")
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD],
        env={"MILES_STACKS": str(folder), "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        assert main(["stacks", str(tmp_path), "--method", "signal"]) == 0
        shown = capsys.readouterr().out
        assert f"=== trainer rank 1 (process {child.pid})" in shown and "in wait_for_the_test" in shown
        assert child.poll() is None  # it goes on
    finally:
        child.communicate(b"\n", timeout=60)
    assert child.returncode == 0
    assert main(["stacks", str(tmp_path)]) == 1
    assert "no live process" in capsys.readouterr().err
