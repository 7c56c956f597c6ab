"""Whole runs that train adapters beside a packed base (QLoRA): engine and trainer compute with the same bytes."""

import asyncio
import json
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import everything, flags, miles, write_inputs
from tests.server_api.tiny import BLOCKS

from miles.backends.native.engine.request import GenerateRequest
from miles.cluster.executor import InlineExecutor
from miles.core.protocols import SamplingParams
from miles.launch.commands.serve import build_server, read_serve_config
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

LORA = ("--lora-rank", "4", "--lora-alpha", "8")
EXACT = ("--parity", "exact")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def train(inputs: Path, run: Path, *more: str, steps: int = 2) -> list[dict]:
    done = miles("train", *flags(inputs, run, *LORA, *more, steps=steps))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))


def test_a_served_run_is_sent_adapters_alone_and_has_zero_parity_difference(inputs, tmp_path):
    run, more = (
        tmp_path / "run",
        ("--train-precision", "int4_g32", "--dtype", "bfloat16", "--rollout-backend", "served"),
    )
    rows = train(inputs, run, *EXACT, *more, "--target-modules", "q_proj,v_proj,down_proj", steps=3)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 3
    assert all(row["grad_norm"] > 0 for row in rows)
    found = load_file(last(run) / "adapter" / "adapter_model.safetensors")
    size = sum(tensor.numel() * 2 for tensor in found.values())
    timed = [json.loads(line) for file in run.glob("*.jsonl") for line in file.read_text().splitlines()]
    sent = [row["seconds"]["publish/bytes"] for row in timed if row.get("kind") == "train" and "seconds" in row]
    assert len(sent) == 3 and all(size / 2 <= each < size + 4096 for each in sent)


def test_the_adapter_of_a_run_is_served_beside_a_packed_base(inputs, tmp_path):
    train(inputs, tmp_path / "run", "--train-precision", "int4_g32")
    adapter = last(tmp_path / "run") / "adapter"
    line = (str(inputs), "--device", "cpu", "--rollout-precision", "int4_g32")

    async def score(*more: str) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
        _, engine = await build_server(read_serve_config([*line, *more]), None, InlineExecutor())
        prompt = np.arange(2, 14, dtype=np.int32)
        request = GenerateRequest(tokens=prompt, sampling=SamplingParams(max_new_tokens=0), logprob_start_len=0)
        output = engine.submit(request)
        await output.completion()
        weights = dict(engine.weights())
        await engine.close()
        assert output.prompt_logprobs is not None
        return np.array(output.prompt_logprobs.logprobs[1:]), weights

    plain, base = asyncio.run(score())
    ours, weights = asyncio.run(score("--lora-adapter-path", str(adapter)))
    assert all(torch.equal(weights[name].view(torch.uint8), base[name].view(torch.uint8)) for name in base)
    found = load_file(adapter / "adapter_model.safetensors")
    factors = {name: tensor for name, tensor in weights.items() if name not in base}
    assert sum(t.numel() for t in factors.values()) == sum(t.numel() for t in found.values())
    down = next(tensor for name, tensor in found.items() if name.endswith("layers.0.mlp.down_proj.lora_B.weight"))
    assert torch.equal(factors["layers.0.mlp.down.lora_b"], down)
    # The checkpoint is the dequantized base with the adapter merged into it.
    merged, _ = asyncio.run(score("--hf-checkpoint", str(last(tmp_path / "run")), "--rollout-precision", "auto"))
    assert np.abs(ours - merged).max() < 1e-3 < np.abs(ours - plain).max()


@pytest.mark.slow
def test_ranks_come_to_what_one_process_comes_to(inputs, tmp_path):
    more = ("--train-precision", "fp8", *EXACT)
    for name, ranks in (("one", ()), ("two", ("--actor-num-gpus-per-node", "2"))):
        rows = train(inputs, tmp_path / name, *more, *ranks)
        assert [row["parity_max_abs"] for row in rows] == [0.0, 0.0]
    mine, theirs = (weights_in(last(tmp_path / name)) for name in ("two", "one"))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3
    further = miles(
        "train", *flags(inputs, tmp_path / "two", *LORA, *more, steps=3)
    )  # by one, from what two have saved
    assert further.returncode == 0, further.stderr


def test_a_killed_run_continues_to_the_bit(inputs, tmp_path):
    more = ("--train-precision", "int4_g32")
    train(inputs, tmp_path / "calm", *more, steps=4)
    line = flags(inputs, tmp_path / "run", *LORA, *more, steps=4)
    assert miles("train", *line, kill_at="miles.train.optim.optimizer:Optimizer.step:6").returncode == -signal.SIGKILL
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert everything(tmp_path / "run") == everything(tmp_path / "calm")


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    """A model whose matrices have whole blocks on each of two ranks."""
    inputs = write_inputs(tmp_path_factory.mktemp("blocks"))
    config = {**read_config(inputs), **BLOCKS}
    decoder = hf.init_random(spec_from_config(config), seed=1, device="cpu", dtype=torch.float32)
    hf.export(decoder, inputs, like=None, config=config)
    return inputs


@pytest.mark.parametrize("more", [(), ("--rollout-backend", "served")], ids=["embedded", "served"])
def test_adapters_of_packed_experts_have_zero_parity_difference(moe, tmp_path, more):
    precision = ("--train-precision", "int4_g32", "--dtype", "bfloat16", "--target-modules", "attn,experts")
    rows = train(moe, tmp_path / "run", *EXACT, *precision, *more)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 2
    assert all(row["grad_norm"] > 0 for row in rows)


@pytest.mark.slow
def test_tensor_ranks_over_a_packed_base_come_to_what_one_process_comes_to(blocks, tmp_path):
    packed, ranks = ("--train-precision", "int4_g32"), ("--actor-num-gpus-per-node", "2")
    train(blocks, tmp_path / "one", *packed)
    rows = train(blocks, tmp_path / "two", *packed, *ranks, "--tensor-model-parallel-size", "2")
    assert all(row["parity_max_abs"] < 1e-4 for row in rows)
    mine, theirs = (weights_in(last(tmp_path / each)) for each in ("two", "one"))
    assert max(float((mine[each] - theirs[each]).abs().max()) for each in mine) < 1e-3


@pytest.mark.slow
def test_expert_ranks_over_a_packed_base_come_to_what_one_process_comes_to(moe, tmp_path):
    packed = ("--train-precision", "int4_g32", "--target-modules", "attn,experts")
    train(moe, tmp_path / "one", *packed)
    ranks = ("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2")
    rows = train(moe, tmp_path / "two", *packed, *ranks)
    assert all(row["parity_max_abs"] < 1e-4 for row in rows)
    mine, theirs = (weights_in(last(tmp_path / each)) for each in ("two", "one"))
    assert max(float((mine[each] - theirs[each]).abs().max()) for each in mine) < 1e-3
