"""Whole runs in low precision: engine and trainer multiply with the same bytes, in every placement."""

import json
import signal
from dataclasses import replace

import pytest
import torch
from tests.launch.small_run import everything, flags, miles, write_inputs

from miles.models.checkpoint import hf
from miles.models.packing import pack_params
from miles.models.quantization import plan_quantization
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.precision.quantize import dequantize, row_block
from miles.precision.quantized_tensor import QuantizedTensor

FIRST = ("--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "0")
RANKS = ("--actor-num-gpus-per-node", "2")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return {moe: write_inputs(folder / str(moe), moe=moe) for moe in (False, True)}


def train(inputs, run, *more, steps=2):
    done = miles("train", *flags(inputs, run, *more, steps=steps))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.parametrize(
    ("moe", "more"),
    [
        (False, ("--train-precision", "fp8", "--dtype", "bfloat16", "--gradient-checkpointing")),
        (True, ("--train-precision", "fp8", "--rollout-backend", "served")),
        (True, ("--train-precision", "fp8", "--expert-model-parallel-size", "2", *RANKS)),
        (False, ("--train-precision", "fp8", "--fp8-format", "hybrid", *FIRST, *RANKS)),
        (True, ("--train-precision", "int4_g32", "--optimizer-state-dtype", "int8")),
        (False, ("--train-precision", "int4_g32_asym", "--rollout-backend", "served")),
        (True, ("--train-precision", "nvfp4", "--quantize-experts-only")),
        (False, ("--train-precision", "fp8", "--lora-rank", "4", "--dtype", "bfloat16", "--gradient-checkpointing")),
        (True, ("--train-precision", "int4_g32", "--lora-rank", "4", *FIRST)),
    ],
)
def test_a_run_trained_in_low_precision_has_zero_parity_difference(inputs, tmp_path, moe, more):
    rows = train(inputs[moe], tmp_path / "run", "--parity", "exact", *more)
    assert [row["parity_max_abs"] for row in rows] == [0.0, 0.0]
    assert all(row["parity_tokens"] > 0 and row["grad_norm"] > 0 for row in rows)


def test_a_killed_run_in_fp8_continues_to_the_bit(inputs, tmp_path):
    more = ("--train-precision", "fp8")
    train(inputs[False], tmp_path / "calm", *more, steps=4)
    line = flags(inputs[False], tmp_path / "run", *more, steps=4)
    assert miles("train", *line, kill_at="miles.train.optim.optimizer:Optimizer.step:6").returncode == -signal.SIGKILL
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert everything(tmp_path / "run") == everything(tmp_path / "calm")


def test_an_export_in_the_engines_precision_has_the_bytes_that_were_served(inputs, tmp_path):
    more = ("--train-precision", "int4_g32", "--dtype", "bfloat16", "--save-hf-precision", "rollout")
    train(inputs[True], tmp_path / "run", *more, "--save-hf", str(tmp_path / "hf"), "--quantize-experts-only")
    quantization = QuantizationSpec(format=FORMATS["int4_g32"], packed=True, experts_only=True)
    checkpoint, exported = (
        hf.load(folder, device="cpu", dtype=torch.bfloat16)
        for folder in (max((tmp_path / "run" / "checkpoints").iterdir()), tmp_path / "hf")
    )
    spec = replace(checkpoint.spec, quantization=quantization)
    params = {name: p.detach() for name, p in checkpoint.named_parameters()}
    packed = pack_params(spec, params, torch.bfloat16)
    again = pack_params(spec, {name: p.detach() for name, p in exported.named_parameters()}, torch.bfloat16)
    for name, plan in plan_quantization(spec).items():
        block = row_block(plan.format, params[name].shape[-2], plan.segments)
        served = dequantize(QuantizedTensor.from_tensors(plan.format, name, packed, block), torch.bfloat16)
        assert torch.equal(exported.get_parameter(name), served)
        del again[name]
    assert all(torch.equal(again[name], params[name]) for name in again if name in params)


def test_an_engine_in_fp8_beside_a_wide_trainer_differs_by_the_rounding(inputs, tmp_path):
    rows = train(inputs[False], tmp_path / "run", "--rollout-precision", "fp8")
    assert all(1e-4 < row["parity_mean_abs"] < 0.1 for row in rows)
