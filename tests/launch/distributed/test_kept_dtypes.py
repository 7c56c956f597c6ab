"""Parameters that keep their own dtype in a bfloat16 model: what several ranks gather for an engine."""

import json

import pytest
from tests.launch.small_run import flags, miles, write_inputs
from tests.launch.test_family_runs import ids_of
from tests.models.oracle import hf_model

RANKS = ("--actor-num-gpus-per-node", "2", "--dtype", "bfloat16", "--parity", "exact")


# A correction bias in float32; tables of experts by token; constants of n-gram hashes.
@pytest.mark.parametrize("kind", ["kimi k2", "deepseek v4", "hybrid qwen4"])
def test_an_engine_takes_what_two_ranks_gather_of_a_bfloat16_model(kind, tmp_path):
    inputs = write_inputs(tmp_path / "model")
    hf_model(kind, **ids_of(inputs)).save_pretrained(inputs)
    line = flags(inputs, tmp_path / "run", *RANKS, "--engine-kv-tokens", "4096", steps=2)
    done = miles("train", *line)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["parity_max_abs"] for row in rows if row["kind"] == "train"] == [0.0, 0.0]
