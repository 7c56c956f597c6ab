"""Whole runs in FP8 on stock SGLang, whose FP8 GEMMs are torch here: log-probs, adapters, and what is exported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import flags, miles, write_inputs
from tests.server_api.live_servers import PYTHON, STUB
from tests.server_api.tiny import BLOCKS

from miles.models.checkpoint import hf
from miles.models.checkpoint.hf_packed import iter_quantized_hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.packing import pack_params
from miles.precision.formats import FORMATS, QuantizationSpec


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """The usual task, with a model whose weights are whole blocks of FP8."""
    folder = write_inputs(tmp_path_factory.mktemp("inputs"))
    config = {**read_config(folder), **BLOCKS}
    decoder = hf.init_random(spec_from_config(config), seed=1, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, like=None, config=config)
    return folder


def train(inputs: Path, run: Path, *more: str) -> list[dict]:
    python = run.parent / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={STUB} exec {PYTHON} "$@"\n')
    python.chmod(0o755)
    sglang = ("--rollout-backend", "sglang", "--sglang-python", str(python), "--sglang-max-total-tokens", "4096")
    line = flags(inputs, run, *sglang, "--rollout-dtype", "bfloat16", *more, steps=2)
    done = miles("train", *line, patience=900)
    assert done.returncode == 0, done.stderr
    assert "in fp8 for SGLang" in done.stdout
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


@pytest.mark.sglang
@pytest.mark.slow
def test_a_run_in_fp8_samples_from_the_weights_that_it_trains_and_exports(inputs, tmp_path):
    first = ("--first-last-layers-bf16", "--num-layers-at-end-in-bf16", "0")
    export = ("--save-hf", str(tmp_path / "hf"), "--save-hf-precision", "rollout")
    rows = train(inputs, tmp_path / "run", "--train-precision", "fp8", *first, *export)
    assert all(row["parity_mean_abs"] < 0.05 and row["grad_norm"] > 0 for row in rows)
    checkpoint = max((tmp_path / "run" / "checkpoints").iterdir())
    quantization = QuantizationSpec(format=FORMATS["fp8"], packed=True, layers_at_start=1)
    spec = replace(spec_from_config(read_config(checkpoint)), quantization=quantization)
    params = dict(hf.load_slices(checkpoint, rank=0, world=1, device="cpu", dtype=torch.float32))
    sent = dict(iter_quantized_hf(spec, pack_params(spec, params, torch.float32)))
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert exported.keys() == sent.keys()
    scales = [name for name in sent if name.endswith("_scale_inv")]
    assert len(scales) == 2 * 7 and all(torch.equal(exported[name], sent[name]) for name in scales)


@pytest.mark.sglang
@pytest.mark.slow
def test_adapters_are_sent_as_the_packed_matrices_that_have_them(inputs, tmp_path):
    run = tmp_path / "run"
    rows = train(inputs, run, "--rollout-precision", "fp8", "--lora-rank", "4", "--target-modules", "q_proj,v_proj")
    assert all(row["parity_mean_abs"] < 0.2 for row in rows)
    published = [
        json.loads(line)["seconds"]["publish/bytes"]
        for line in (run / "timings.jsonl").read_text().splitlines()
        if "publish/bytes" in json.loads(line).get("seconds", {})
    ]
    layers, values = BLOCKS["num_hidden_layers"], BLOCKS["hidden_size"] * BLOCKS["head_dim"]
    heads = read_config(inputs)["num_attention_heads"] + read_config(inputs)["num_key_value_heads"]
    assert published and max(published) <= layers * values * heads * (1 + 4 / 128**2)
