"""Whole runs that train adapters beside a base that is not packed (--no-lora-merge)."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_run import everything, flags, miles, untie_embeddings, write_inputs

from miles.models.checkpoint import hf

LORA = ("--lora-rank", "4", "--lora-alpha", "8", "--no-lora-merge")
EXACT = ("--parity", "exact")
EXPERTS = ("--target-modules", "attn,experts")


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("moe"), moe=True)


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    """The dense model with an output layer of its own, which begins as the embedding."""
    return untie_embeddings(write_inputs(tmp_path_factory.mktemp("untied")))


def train(inputs: Path, run: Path, *more: str, steps: int = 2) -> list[dict]:
    done = miles("train", *flags(inputs, run, *LORA, *more, steps=steps))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))


def count_sent(run: Path) -> list[int]:
    rows = [json.loads(line) for file in run.glob("*.jsonl") for line in file.read_text().splitlines()]
    return [row["seconds"]["publish/bytes"] for row in rows if row.get("kind") == "train" and "seconds" in row]


@pytest.mark.parametrize(
    "more",
    [
        ("--lora-merge",),
        (),
        pytest.param(("--lora-versions", "2"), marks=pytest.mark.extended),
        pytest.param(("--rollout-backend", "served"), marks=pytest.mark.extended),
    ],
    ids=["merged", "beside", "versions", "served"],
)
def test_an_adapter_of_the_output_layer_has_exact_parity(untied, tmp_path, more):
    run = tmp_path / "run"
    rows = train(untied, run, *EXACT, *more, "--dtype", "bfloat16", "--target-modules", "q_proj,lm_head")
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 2
    before, after = ({n: t.to(torch.bfloat16) for n, t in weights_in(f).items()} for f in (untied, last(run)))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {each for each in after if each.endswith(("qkv.weight", "lm_head.weight"))}
    assert "lm_head" in json.loads((last(run) / "adapter" / "adapter_config.json").read_text())["target_modules"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("name", "more"), [("dense", ()), ("moe", EXPERTS)], ids=["dense", "moe"])
def test_parity_is_exact_and_a_checkpoint_is_the_merged_model(request, tmp_path, name, more, dtype):
    inputs, run = request.getfixturevalue(name), tmp_path / "run"
    rows = train(inputs, run, *EXACT, *more, "--dtype", dtype)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 2
    assert all(row["grad_norm"] > 0 for row in rows)
    before, after = ({n: t.to(getattr(torch, dtype)) for n, t in weights_in(f).items()} for f in (inputs, last(run)))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    ends = ("gate_up", "down") if name == "moe" else ("gate_up.weight", "down.weight")
    assert moved == {each for each in after if each.endswith(("qkv.weight", "output.weight", *ends))}


def test_experts_in_a_served_engine_are_sent_adapters_alone(moe, tmp_path):
    run = tmp_path / "run"
    rows = train(moe, run, *EXACT, *EXPERTS, "--rollout-backend", "served", "--dtype", "bfloat16", steps=3)
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 3
    found = load_file(last(run) / "adapter" / "adapter_model.safetensors")
    size = sum(tensor.numel() * 2 for tensor in found.values())
    sent = count_sent(run)
    assert len(sent) == 3 and all(size / 2 <= each < size + 4096 for each in sent)


def test_engine_and_trainer_agree_with_merged_experts_under_dora(moe, tmp_path):
    rows = train(moe, tmp_path / "run", *EXACT, *EXPERTS, "--lora-merge", "--use-dora")
    assert [row["parity_max_abs"] for row in rows] == [0.0] * 2
    found = load_file(last(tmp_path / "run") / "adapter" / "adapter_model.safetensors")
    assert sum(".experts." in name and name.endswith("lora_magnitude_vector") for name in found) > 0


@pytest.mark.parametrize("more", [(), ("--experts-shared-outer-loras",)], ids=["own", "shared"])
def test_a_killed_run_of_experts_continues_to_the_bit(moe, tmp_path, more):
    more = (*EXPERTS, *more)
    train(moe, tmp_path / "calm", *more, steps=4)
    line = flags(moe, tmp_path / "run", *LORA, *more, steps=4)
    assert miles("train", *line, kill_at="miles.train.optim.optimizer:Optimizer.step:6").returncode == -signal.SIGKILL
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert everything(tmp_path / "run") == everything(tmp_path / "calm")


def test_an_asynchronous_engine_shares_the_base_and_has_its_own_adapters(moe, tmp_path):
    rows = train(moe, tmp_path / "run", *EXACT, *EXPERTS, "--max-weight-staleness", "1", steps=3)
    compared = [row["parity_max_abs"] for row in rows if "parity_max_abs" in row]  # that are not stale
    assert compared and not any(compared)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--actor-num-gpus-per-node", "2"),
        ("--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2"),
        ("--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2"),
    ],
    ids=["fsdp", "ep", "tp"],
)
def test_ranks_come_to_what_one_process_comes_to(moe, tmp_path, layout):
    for name, ranks in (("one", ()), ("two", layout)):
        rows = train(moe, tmp_path / name, *EXPERTS, *ranks)
        assert all(row["parity_max_abs"] < 1e-4 for row in rows)
    mine, theirs = (weights_in(last(tmp_path / name)) for name in ("two", "one"))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (("--use-dora",), "DoRA does not work with"),
        (("--lora-dropout", "0.1"), "--lora-dropout does not work with"),
        (("--rollout-precision", "fp8"), "--no-lora-merge needs the same base in trainer and engine"),
        (
            ("--rollout-backend", "sglang", "--update-weight-transport", "disk"),
            "--no-lora-merge sends SGLang adapters in requests",
        ),
        (("--rollout-backend", "sglang", "--check-weight-update-equal"), "would overwrite the base of SGLang"),
    ],
)
def test_what_does_not_go_with_it_is_refused_in_a_sentence(dense, tmp_path, more, sentence):
    done = miles("train", *flags(dense, tmp_path / "run", *LORA, *more))
    assert done.returncode == 2 and sentence in done.stderr
