"""Indexer replay through the front door: an engine in bfloat16 beside a trainer in float32, and recorded rollouts."""

import json

import numpy as np
import pytest
from tests.launch.small_run import flags
from tests.launch.test_family_runs import furnish, ids_of
from tests.models.oracle import hf_model

from miles.core.token_fields import INDEXER_TOPK
from miles.launch.main import main
from miles.observe.rollout_reader import read_step_rollouts

REPLAY = "--use-rollout-indexer-replay"
LOW = ("--rollout-dtype", "bfloat16", "--dtype", "float32")
TRAIN_ONLY = ("--debug-train-only", "--no-eval-interval", "--no-eval-prompt-data", "--no-dynamic-sampling-filter-path")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return furnish(tmp_path_factory.mktemp("inputs") / "start", "deepseek v3.2")


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "parity_mean_abs" in row]


def argv_of(inputs, run, *more, steps=2, lr="0"):
    return ["train", *flags(inputs, run, *more, steps=steps, lr=lr)]


@pytest.fixture(scope="module")
def recorded(inputs, tmp_path_factory):
    """A run that replays, and measures without replay too."""
    run = tmp_path_factory.mktemp("runs") / "replayed"
    assert main(argv_of(inputs, run, *LOW, REPLAY, "--parity-no-replay-interval", "1")) == 0
    return run


def test_replay_makes_the_gap_between_precisions_smaller(recorded):
    for row in rows(recorded):
        assert row["parity_mean_abs"] < row["parity_mean_abs_no_replay"]
        assert 0 < row["indexer_mismatch_ratio"] < 0.5


def test_rollout_files_keep_the_selections_and_a_run_trains_on_them(inputs, recorded, tmp_path):
    taken = read_step_rollouts(recorded / "rollouts" / "step-000001.parquet")
    spans = [span for group in taken.groups for t in group.trajectories for branch in t.branches for span in branch]
    assert INDEXER_TOPK not in taken.excluded_extras
    assert all(span.extras[INDEXER_TOPK].dtype == np.uint16 for span in spans)
    again = tmp_path / "again"
    how = (*LOW, REPLAY, "--load-debug-rollout-data", str(recorded), *TRAIN_ONLY)
    assert main(argv_of(inputs, again, *how)) == 0
    ratios = [row["indexer_mismatch_ratio"] for row in rows(recorded)]
    assert [row["indexer_mismatch_ratio"] for row in rows(again)] == pytest.approx(ratios)


def test_recorded_rollouts_without_selections_are_refused(inputs, tmp_path, capsys):
    plain = tmp_path / "plain"
    assert main(argv_of(inputs, plain, *LOW)) == 0
    how = (*LOW, REPLAY, "--load-debug-rollout-data", str(plain), *TRAIN_ONLY)
    assert main(argv_of(inputs, tmp_path / "again", *how)) != 0
    assert "was written without indexer_topk, which this run replays" in capsys.readouterr().err


def test_a_step_of_a_run_with_replay_is_repeated(inputs, recorded, capsys):
    assert main(["replay", str(recorded), "2"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "how",
    [("--max-weight-staleness", "1"), ("--over-sampling-batch-size", "6", "--partial-rollout")],
    ids=["asynchronous", "partial"],
)
def test_asynchronous_and_partial_rollouts_are_replayed(how, inputs, tmp_path):
    run = tmp_path / "run"
    assert main(argv_of(inputs, run, *LOW, REPLAY, *how, steps=3, lr="1e-2")) == 0
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("indexer_mismatch_ratio" in row for row in found) == 3


def selections_of(run):
    """What was recorded for the prompts and responses of the first step, in order, and the tokens."""
    taken = read_step_rollouts(run / "rollouts" / "step-000001.parquet")
    trajectories = [t for group in taken.groups for t in group.trajectories]
    spans = [span for t in trajectories for branch in t.branches for span in branch]
    return [(span.tokens.tolist(), span.extras[INDEXER_TOPK]) for span in spans]


def test_served_engines_replay_the_same_selections_to_the_bit(inputs, tmp_path):
    how = (REPLAY, "--parity", "exact")
    for name, engines in (("native", ()), ("served", ("--rollout-backend", "served"))):
        assert main(argv_of(inputs, tmp_path / name, *how, *engines)) == 0
    alone, served = selections_of(tmp_path / "native"), selections_of(tmp_path / "served")
    assert len(alone) == len(served) > 0
    for (tokens, wanted), (others, found) in zip(alone, served, strict=True):
        assert tokens == others and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    assert any((wanted != np.iinfo(wanted.dtype).max).any() for _, wanted in alone)
    for row in rows(tmp_path / "served"):
        assert row["parity_mean_abs"] == 0 and row["indexer_mismatch_ratio"] == 0


REFUSED = {
    "--rollout-backend sglang": "does not work with --rollout-backend sglang, whose indexers select in an order",
    "--rollout-external-engine-addrs 127.0.0.1:1": "needs engines of this run, which record what their indexers",
    "--model-impl transformers": f"{REPLAY} needs the native model",
}


@pytest.mark.parametrize("other", REFUSED)
def test_engines_and_trainers_that_cannot_replay_are_refused(other, inputs, tmp_path, capsys):
    assert main(["plan", *flags(inputs, tmp_path / "run", REPLAY, *other.split())]) == 2
    assert REFUSED[other] in capsys.readouterr().err


def test_models_without_an_indexer_and_blocks_of_split_engines_are_refused(tmp_path, capsys):
    folder = furnish(tmp_path / "dense", "deepseek v3")
    assert main(["plan", *flags(folder, tmp_path / "run", REPLAY)]) == 2
    assert "is for sparse-attention models with an indexer, which --hf-checkpoint is not" in capsys.readouterr().err
    blocks = hf_model("minimax-m3", **ids_of(folder))
    config = blocks.config.to_dict() | {"architectures": [type(blocks).__name__]}
    (folder / "config.json").write_text(json.dumps(config))
    how = ("--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "2")
    assert main(["plan", *flags(folder, tmp_path / "run", REPLAY, *how)]) == 0
    engines = ("--rollout-backend", "served", "--rollout-num-gpus-per-engine", "2")
    assert main(["plan", *flags(folder, tmp_path / "run", REPLAY, *engines)]) == 2
    assert "needs engines of one GPU where each key-value head selects blocks" in capsys.readouterr().err
