"""Runs of adapters over a packed base with Megatron ranks, against the FSDP trainer in one process."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron.test_cli import run_miles, train
from tests.launch.small_run import flags, write_inputs
from tests.server_api.tiny import BLOCKS

from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--lr", "1e-2")
KL = ("--use-kl-loss", "--kl-loss-coef", "0.1")
TWO = ("--train-backend", "megatron", "--actor-num-gpus-per-node", "2")
TENSOR, PIPELINE = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
EXPERTS = ("--expert-model-parallel-size", "2")
LAST = "checkpoints/step-000003"


def write_blocks(folder: Path) -> Path:
    """The inputs of a run, and a model whose matrices have whole blocks on each of two ranks."""
    inputs = write_inputs(folder)
    sizes = {"num_key_value_heads": 4, "intermediate_size": 512, "num_hidden_layers": 4}
    config = {**read_config(inputs), **BLOCKS, **sizes}
    decoder = hf.init_random(spec_from_config(config), seed=1, device="cpu", dtype=torch.float32)
    hf.export(decoder, inputs, like=None, config=config)
    return inputs


def read_adapter(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / LAST / "adapter" / "adapter_model.safetensors")


RUNS = {
    "tensor": (False, ("--train-precision", "int4_g32", *KL, "--rollout-backend", "served"), TENSOR),
    "blocks of rows": (False, ("--train-precision", "fp8", *KL), (*TENSOR, "--sequence-parallel")),
    "pipeline": (False, ("--train-precision", "nvfp4", *KL, "--first-last-layers-bf16"), PIPELINE),
    "experts": (True, ("--train-precision", "int4_g32", "--target-modules", "all-linear,experts"), EXPERTS),
    "experts only": (True, ("--train-precision", "mxfp4", "--quantize-experts-only"), EXPERTS),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_over_a_packed_base_on_megatron_is_the_run_on_fsdp(tmp_path: Path, name: str):
    moe, more, layout = RUNS[name]
    inputs = write_inputs(tmp_path / "inputs", moe=True) if moe else write_blocks(tmp_path / "inputs")
    # What FP8 activations are rounded to depends on the last bits of sums over tensor-parallel ranks.
    ranks = ("--actor-num-gpus-per-node", "2", *TENSOR) if "fp8" in more else ()
    wanted = train(inputs, tmp_path / "fsdp", *LORA, *more, *ranks)
    found = train(inputs, tmp_path / "megatron", *LORA, *more, *TWO, *layout)
    assert len(found) == 3 and found == pytest.approx(wanted, abs=1e-6)
    one, two = (read_adapter(tmp_path / run) for run in ("fsdp", "megatron"))
    assert one.keys() == two.keys() and all(torch.allclose(one[n], two[n], atol=5e-3) for n in one)


def test_a_run_over_a_packed_base_resumes_to_the_bit_and_in_another_layout(tmp_path: Path):
    inputs = write_blocks(tmp_path / "inputs")
    line = (*LORA, *KL, "--train-precision", "int4_g32", "--save-interval", "1")
    stop = ("--debug-exit-after-rollout", "2")
    wanted = train(inputs, tmp_path / "whole", *line, *TWO, *PIPELINE)
    run_miles("train", *flags(inputs, tmp_path / "same", *line, *TWO, *PIPELINE, *stop, steps=3))
    assert train(inputs, tmp_path / "same", *line, *TWO, *PIPELINE) == wanted
    one, two = (read_adapter(tmp_path / run) for run in ("whole", "same"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    # By FSDP, from what Megatron has saved.
    run_miles("train", *flags(inputs, tmp_path / "other", *line, *TWO, *TENSOR, *stop, steps=3))
    assert train(inputs, tmp_path / "other", *line) == pytest.approx(wanted, abs=1e-6)
    other = read_adapter(tmp_path / "other")
    assert all(torch.allclose(other[name], one[name], atol=5e-3) for name in one)


ENGINE_OF_TWO = ("--rollout-num-gpus-per-engine", "2", "--rollout-backend", "served")
EXACT = {
    "tensor": (False, "--train-precision", "fp8", *TENSOR, *ENGINE_OF_TWO),
    "pipeline": (False, "--train-precision", "nvfp4", *PIPELINE),
    "experts": (
        *(True, "--train-precision", "int4_g32", "--target-modules", "all-linear,experts"),
        *(*EXPERTS, "--use-rollout-routing-replay"),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_run_over_a_packed_base_has_no_mismatch_after_any_publication(tmp_path: Path, name: str):
    moe, *more = EXACT[name]
    inputs = write_inputs(tmp_path / "inputs", moe=True) if moe else write_blocks(tmp_path / "inputs")
    train(inputs, tmp_path / "run", *LORA, *TWO, "--parity", "exact", "--dtype", "bfloat16", *more)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "train"]
    assert [row["parity_max_abs"] for row in steps] == [0.0] * 3
    assert all(row["parity_tokens"] > 0 and row["grad_norm"] > 0 for row in steps)
