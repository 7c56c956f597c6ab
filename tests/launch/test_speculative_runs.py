"""Whole runs with speculative decoding: the numbers of runs without it, also after a kill, and its metrics."""

import json
import signal

import pytest
from tests.launch.small_run import everything, flags, miles, write_inputs

from miles.observe.metric import SPECULATION

STEPS = 4
# Samples of a low temperature repeat each other, so that many drafts are accepted.
REPEATING = ("--rollout-max-response-len", "24", "--rollout-temperature", "0.3", "--rollout-batch-size", "2")
NONE = ("--speculative-algorithm", "none")
NGRAM = ("--speculative-algorithm", "ngram")
# Also where drafts do not pay, so that every step has some.
ALWAYS = (*NGRAM, "--disable-speculative-adaptive")
EXACT = ("--parity", "exact")
LORA = ("--lora-rank", "4", "--lora-alpha", "8")
KILL = "miles.train.optim.optimizer:Optimizer.step:8"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def train(inputs, run, *more, **options):
    return miles("train", *flags(inputs, run, *REPEATING, *more, steps=STEPS), **options)


def speculative_metrics(run):
    """Metrics of speculative decoding of each step; they are in no log that a resumed run must repeat."""
    rows = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    steps = [row["seconds"] for row in rows if row["kind"] == "train"]
    for name in ("metrics.jsonl", "events.jsonl"):
        assert "speculative/" not in (run / name).read_text()
    return [{name: value for name, value in step.items() if name.startswith("speculative/")} for step in steps]


@pytest.fixture(scope="module")
def plain(inputs, tmp_path_factory):
    """The run without speculative decoding."""
    run = tmp_path_factory.mktemp("plain") / "run"
    done = train(inputs, run, *EXACT, *NONE)
    assert done.returncode == 0, done.stderr
    assert "accept len" not in done.stdout and speculative_metrics(run) == STEPS * [{}]
    return run


def test_with_exact_parity_a_run_with_drafts_is_the_run_without_to_the_bit(inputs, plain, tmp_path):
    run = tmp_path / "run"
    done = train(inputs, run, *ALWAYS, *EXACT)
    assert done.returncode == 0, done.stderr
    ours, theirs = everything(run), everything(plain)
    assert ours.keys() == theirs.keys()
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    steps = speculative_metrics(run)
    assert all(any(metric.matches(name) for metric in SPECULATION) for step in steps for name in step)
    assert all(0 < step["speculative/token_share"] <= 1 for step in steps)
    assert max(step["speculative/accept_length"] for step in steps) > 1.1
    assert done.stdout.count("accept len") == STEPS
    counters = [record for record in json.loads((run / "trace" / "loop.json").read_text()) if record["ph"] == "C"]
    assert {record["name"] for record in counters} == {name for step in steps for name in step}


def test_by_default_a_run_with_exact_parity_drafts_and_says_so(inputs, plain, tmp_path):
    run = tmp_path / "run"
    done = train(inputs, run, *EXACT)
    assert done.returncode == 0, done.stderr
    assert "n-gram drafts where they pay, because with --parity exact they change no bit" in done.stdout + done.stderr
    ours, theirs = everything(run), everything(plain)
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert any("speculative/token_share" in step for step in speculative_metrics(run))


def test_a_killed_run_makes_other_drafts_and_the_same_numbers(inputs, plain, tmp_path):
    run = tmp_path / "run"
    assert train(inputs, run, *NGRAM, *EXACT, kill_at=KILL).returncode == -signal.SIGKILL
    again = train(inputs, run, *NGRAM, *EXACT)
    assert again.returncode == 0, again.stderr
    ours, theirs = everything(run), everything(plain)
    assert [name for name in theirs if ours[name] != theirs[name]] == []


def test_without_exact_parity_a_killed_run_resumes_although_last_bits_may_differ(inputs, tmp_path):
    run = tmp_path / "run"
    assert train(inputs, run, *NGRAM, kill_at=KILL).returncode == -signal.SIGKILL
    again = train(inputs, run, *NGRAM)
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4]
    assert all(row["parity_max_abs"] < 1e-4 for row in rows if row["kind"] == "train")


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--rollout-backend", "served", "--rollout-num-engines", "2"), id="served"),
        pytest.param(LORA, id="LoRA"),
        pytest.param((*LORA, "--train-precision", "int4_g32", "--dtype", "bfloat16"), id="packed INT4 under LoRA"),
        pytest.param(("--kv-cache-dtype", "fp8_e4m3"), id="FP8 KV cache"),
        pytest.param(("--use-rollout-routing-replay",), id="MoE with routing replay"),
    ],
)
def test_other_features_have_the_numbers_of_runs_without_drafts(inputs, tmp_path, more):
    if "--use-rollout-routing-replay" in more:
        inputs = write_inputs(tmp_path / "moe", moe=True)
    for name, drafts in (("plain", NONE), ("drafts", NGRAM)):
        done = train(inputs, tmp_path / name, *EXACT, *more, *drafts)
        assert done.returncode == 0, done.stderr
    ours, theirs = everything(tmp_path / "drafts"), everything(tmp_path / "plain")
    assert [name for name in theirs if ours[name] != theirs[name]] == []
    assert max(step.get("speculative/accept_length", 0.0) for step in speculative_metrics(tmp_path / "drafts")) > 1


def test_models_computed_by_transformers_verify_drafts_too(inputs, tmp_path):
    done = train(inputs, tmp_path / "run", *ALWAYS, "--model-impl", "transformers")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(row["parity_max_abs"] < 1e-4 for row in rows if row["kind"] == "train")
    assert max(step["speculative/accept_length"] for step in speculative_metrics(tmp_path / "run")) > 1


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("--max-weight-staleness", "1"), id="asynchronous"),
        pytest.param(("--over-sampling-batch-size", "4", "--partial-rollout"), id="partial rollout"),
    ],
)
def test_what_depends_on_timing_still_has_the_log_probs_of_the_trainer(inputs, tmp_path, more):
    run = tmp_path / "run"
    done = train(inputs, run, *EXACT, *ALWAYS, *more)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["parity_max_abs"] for row in rows if row["kind"] == "train" and "parity_max_abs" in row]
    assert gaps and set(gaps) == {0.0}
    assert any(step.get("speculative/accept_length", 0.0) > 1 for step in speculative_metrics(run))
