"""``--parity exact`` from the command line: runs with zero mismatch, bitwise repeatable, or rejected with a reason."""

import json

import pytest
from tests.launch.small_run import everything, flags, miles, write_inputs
from tests.models.oracle import hf_model
from tests.parity.skewed_engine import skewed

from miles.core.errors import UsageError
from miles.launch.commands.demo import DemoFolders, grpo_flags, warmup_flags
from miles.launch.commands.serve import read_serve_config
from miles.launch.config import DemoOptions
from miles.launch.read_config import read

TIGHT = (
    *("--parity", "exact", "--engine-kv-tokens", "64", "--engine-page-size", "2", "--engine-prefill-chunk", "5"),
    *("--max-tokens-per-gpu", "40", "--gradient-checkpointing", "--dtype", "bfloat16"),
)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def inputs(request, tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), moe=request.param)


def trained(inputs, run, *more):
    done = miles("train", *flags(inputs, run, *more, steps=2))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def test_a_run_in_tight_quarters_says_zero_at_every_step_and_repeats_to_the_bit(inputs, tmp_path):
    rows = trained(inputs, tmp_path / "one", *TIGHT)
    assert [row["parity_max_abs"] for row in rows] == [0.0, 0.0]
    assert all(row["parity_tokens"] > 0 for row in rows)
    trained(inputs, tmp_path / "two", *TIGHT)
    assert everything(tmp_path / "one") == everything(tmp_path / "two")


def test_a_run_whose_engine_says_another_bit_is_stopped_before_the_update(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    (tmp_path / "said").mkdir()
    done = skewed(tmp_path / "said", "train", *flags(inputs, tmp_path / "run", "--parity", "exact", steps=2))
    assert done.returncode == 1
    assert "--parity exact requires equal log-probs, but after version 0 they differ at token" in done.stderr
    assert "the weights were not changed; miles parity" in done.stderr and "Traceback" not in done.stderr


# -- what is refused ------------------------------------------------------------------------


def problems(kind, tmp_path, *more, **changes):
    inputs = write_inputs(tmp_path / "inputs")
    hf_model(kind, **changes).save_pretrained(inputs)
    with pytest.raises(UsageError) as refused:
        read("train", flags(inputs, tmp_path / "run", "--parity", "exact", *more))
    return [sentence for sentence in refused.value.problems if "--parity exact" in sentence]


def test_everything_that_cannot_be_exact_is_said_at_once(tmp_path):
    more = ("--train-backend", "megatron", "--rollout-dtype", "bfloat16", "--tensor-model-parallel-size", "2")
    more += ("--train-precision", "fp8")
    said = problems("qwen3", tmp_path, *more, head_dim=512)
    assert len(said) == 4
    for word in (
        "heads of 512 channels",
        "--train-backend megatron",
        "--rollout-dtype bfloat16",
        "tensor-parallel size",
    ):
        assert sum(word in sentence for sentence in said) == 1


def test_a_head_that_megatron_would_shard_is_refused(tmp_path):
    more = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2")
    more += ("--rollout-num-gpus-per-engine", "2", "--rollout-backend", "served")
    (said,) = problems("qwen3", tmp_path, *more, num_key_value_heads=1)
    assert "needs a number of key-value heads that is a multiple of --tensor-model-parallel-size 2" in said


def test_a_foreign_module_is_refused(tmp_path):
    (foreign,) = problems("qwen3", tmp_path, "--model-impl", "transformers")
    assert "is computed by transformers" in foreign


def test_a_critic_that_cannot_be_exact_is_refused(tmp_path):
    hf_model("qwen3", head_dim=512).save_pretrained(tmp_path / "critic")
    more = ("--advantage-estimator", "ppo", "--critic-load", str(tmp_path / "critic"))
    (said,) = problems("qwen3", tmp_path, *more)
    assert f"--critic-load {tmp_path / 'critic'}: layer" in said


def test_a_server_refuses_too(tmp_path):
    hf_model("qwen3", head_dim=512).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="--parity exact does not work with this model: layer"):
        read_serve_config([str(tmp_path), "--parity", "exact"])


def test_the_demo_passes_its_arithmetic_on(tmp_path):
    places, options = DemoFolders(root=tmp_path), DemoOptions(parity="exact")
    for argv in (warmup_flags(places, options), grpo_flags(places, options, tmp_path)):
        assert argv[argv.index("--parity") + 1] == "exact"


def test_a_plan_of_exact_latent_attention_counts_what_its_engine_remembers(tmp_path, capsys):
    from tests.parity.planes import spec_of_kind

    from miles.kernels.numerics import BATCH_INVARIANT, FAST
    from miles.models.accounting.params import kv_bytes_per_token

    spec = spec_of_kind("deepseek v3")
    mixer = spec.layers[0].mixer
    each = mixer.num_heads * (mixer.head_dim + mixer.value_dim)
    exact, short = (kv_bytes_per_token(spec, "float32", numerics) for numerics in (BATCH_INVARIANT, FAST))
    assert exact == 4 * each * spec.num_layers > short
