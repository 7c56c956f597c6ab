"""Whole runs that train adapters alone: to the bit, in every placement, and nothing of it in silence."""

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.launch.small_config import furnish
from tests.launch.small_run import everything, flags, miles, write_inputs

from miles.config.cli import parse
from miles.config.files import read_layers
from miles.launch.config import Config
from miles.launch.plan.memory import estimate_memory
from miles.launch.plan.plan import build_plan
from miles.launch.rules.check import Command, check_rules
from miles.models.checkpoint import hf
from miles.models.resolve import resolve_spec

LORA = ("--lora-rank", "4", "--lora-alpha", "8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def calm(inputs, tmp_path_factory):
    run = tmp_path_factory.mktemp("calm") / "run"
    done = miles("train", *flags(inputs, run, *LORA, steps=4))
    assert done.returncode == 0, done.stderr
    return run


def last(run: Path) -> Path:
    return max((run / "checkpoints").iterdir())


def train_rows(run: Path) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    return dict(hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=torch.float32))


def test_a_run_moves_the_targets_and_leaves_the_rest_as_it_was(inputs, calm):
    before, after = weights_in(inputs), weights_in(last(calm))
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert moved == {name for name in after if name.split(".")[-2] in ("qkv", "output", "gate_up", "down")}
    assert all(row["parity_max_abs"] < 1e-4 for row in train_rows(calm))
    found = load_file(last(calm) / "adapter" / "adapter_model.safetensors")
    state = load_file(last(calm) / "optimizer.safetensors")
    assert {name.partition(".")[2] for name in state} == {name.removeprefix("base_model.model.") for name in found}


def test_a_killed_run_of_adapters_continues_to_the_bit(inputs, calm, tmp_path):
    run = tmp_path / "run"
    line = flags(inputs, run, *LORA, steps=4)
    assert miles("train", *line, kill_at="miles.train.optim.optimizer:Optimizer.step:6").returncode == -signal.SIGKILL
    again = miles("train", *line)
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)


@pytest.mark.slow
def test_engine_and_trainer_agree_to_the_last_bit_under_exact_parity(inputs, tmp_path):
    done = miles("train", *flags(inputs, tmp_path / "run", *LORA, "--parity", "exact", steps=3))
    assert done.returncode == 0, done.stderr
    assert all(row["parity_max_abs"] == 0.0 for row in train_rows(tmp_path / "run"))


@pytest.mark.slow
def test_ranks_come_to_what_one_process_comes_to(inputs, calm, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(inputs, run, *LORA, "--actor-num-gpus-per-node", "2", steps=4))
    assert done.returncode == 0, done.stderr
    mine, theirs = weights_in(last(run)), weights_in(last(calm))
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3
    further = miles("train", *flags(inputs, run, *LORA, steps=5))  # by one process, from what two have saved
    assert further.returncode == 0, further.stderr


@pytest.mark.slow
def test_tensor_ranks_with_a_reference_come_to_what_one_process_comes_to(inputs, tmp_path):
    more = (*LORA, "--use-kl-loss", "--kl-loss-coef", "0.1", "--ref-update-interval", "2", "--save-interval", "1")
    runs = [tmp_path / "one", tmp_path / "two"]
    for run, layout in zip(runs, ((), ("--tensor-model-parallel-size", "2", "--sequence-parallel")), strict=True):
        ranks = ("--actor-num-gpus-per-node", "2", *layout) if layout else ()
        done = miles("train", *flags(inputs, run, *more, *ranks, steps=3))
        assert done.returncode == 0, done.stderr
    mine, theirs = (weights_in(last(run)) for run in runs)
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in mine) < 1e-3
    further = miles("train", *flags(inputs, runs[1], *more, steps=4))  # by one process, from what two have saved
    assert further.returncode == 0, further.stderr


@pytest.mark.slow
def test_a_served_run_is_sent_adapters_alone_and_comes_to_the_same(inputs, calm, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(inputs, run, *LORA, "--rollout-backend", "served", steps=4))
    assert done.returncode == 0, done.stderr
    mine, theirs = weights_in(last(run)), weights_in(last(calm))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    found = load_file(last(run) / "adapter" / "adapter_model.safetensors")
    numbers = sum(tensor.nbytes for tensor in found.values())
    timed = [json.loads(line) for file in run.glob("*.jsonl") for line in file.read_text().splitlines()]
    sent = [row["seconds"]["publish/bytes"] for row in timed if row.get("kind") == "train" and "seconds" in row]
    assert len(sent) == 4 and all(numbers <= each < numbers + 4096 for each in sent)


@pytest.mark.slow
def test_a_run_starts_from_the_adapter_of_another(inputs, calm, tmp_path):
    start = str(last(calm) / "adapter")
    done = miles("train", *flags(inputs, tmp_path / "run", "--lora-adapter-path", start, lr="0", steps=2))
    assert done.returncode == 0, done.stderr
    mine, theirs = weights_in(last(tmp_path / "run")), weights_in(last(calm))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.slow
def test_a_killed_run_with_an_adapter_critic_continues_to_the_bit(inputs, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    more = (*LORA, "--advantage-estimator", "ppo", "--kl-coef", "0.01")
    assert miles("train", *flags(inputs, calm, *more, steps=4)).returncode == 0
    killed = miles(
        "train", *flags(inputs, run, *more, steps=4), kill_at="miles.train.optim.optimizer:Optimizer.step:12"
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    again = miles("train", *flags(inputs, run, *more, steps=4))
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)
    critic = last(calm) / "critic"
    assert not list(critic.glob("model*")) and (critic / "adapter" / "adapter_model.safetensors").exists()
    further = ("--critic-load", str(critic), "--actor-num-gpus-per-node", "2")
    done = miles("train", *flags(inputs, tmp_path / "more", *more, *further, steps=2))
    assert done.returncode == 0, done.stderr
    assert train_rows(calm)[0]["value_mean"] == 0.0 != train_rows(tmp_path / "more")[0]["value_mean"]


# -- before anything starts -----------------------------------------------------------------


@pytest.fixture
def house(tmp_path, monkeypatch):
    furnish(tmp_path)
    untied = json.loads((tmp_path / "model" / "config.json").read_text()) | {"tie_word_embeddings": False}
    (tmp_path / "untied").mkdir()
    (tmp_path / "untied" / "config.json").write_text(json.dumps(untied))
    monkeypatch.chdir(tmp_path)


def list_problems(line: str, command: Command = "train") -> list[str]:
    reading = parse(Config, line.split(), read_layers("good.toml"))
    return [*reading.problems, *check_rules(reading, command)]


@pytest.mark.parametrize(
    "line",
    [
        "--lora-rank 8",
        "--lora-rank 8 --lora-alpha 32 --lora-dropout 0.0 --target-modules all-linear",
        "--lora-rank 8 --target-modules attn,down_proj --exclude-modules k_proj",
        "--lora-rank 8 --target-modules linear_qkv,*.mlp.*",
        "--lora-rank 8 --target-modules all-linear,lm_head --hf-checkpoint untied",
        "--lora-rank 8 --target-modules lm_head --hf-checkpoint untied --no-lora-merge --lora-versions 2",
        "--lora-rank 8 --lora-dropout 0.1 --use-rslora --optimizer muon",
        "--lora-rank 8 --use-dora --use-kl-loss",
        "--lora-rank 8 --use-dora --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "--lora-rank 8 --lora-dropout 0.1 --tensor-model-parallel-size 2 --actor-num-gpus-per-node 2",
        "--hf-checkpoint moe --lora-rank 8 --lora-dropout 0.1 --target-modules experts",
        "--hf-checkpoint moe --lora-rank 8 --use-dora --target-modules experts --experts-shared-outer-loras",
        "--lora-rank 0",
    ],
)
def test_upstreams_flags_are_taken(house, line):
    assert list_problems(line) == []


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--lora-dropout 0.1", "--lora-dropout needs --lora-rank"),
        ("--lora-rank 8 --lora-dropout 0.1 --use-dora", "DoRA does not work with"),
        ("--lora-rank 8 --use-dora --train-precision fp8", "DoRA does not work with"),
        ("--lora-rank 8 --experts-shared-outer-loras", "no routed experts have adapters"),
        ("--lora-rank 8 --target-modules experts", "--target-modules experts names no projection"),
        ("--lora-alpha 32", "--lora-alpha needs --lora-rank"),
        ("--target-modules attn", "--target-modules needs --lora-rank"),
        ("--lora-rank 8 --target-modules c_attn", "--target-modules c_attn names no projection"),
        ("--lora-rank 8 --lora-adapter-path nowhere", "nowhere is not a folder"),
        ("--lora-adapter-path data", "is not a PEFT adapter"),
        ("--lora-rank -1", "--lora-rank"),
        (
            "--lora-rank 8 --train-backend megatron --use-dora --no-lora-merge",
            "DoRA does not work with --train-precision, --no-lora-merge",
        ),
        (
            "--hf-checkpoint moe --lora-rank 8 --target-modules experts --train-backend megatron "
            "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1",
            "experts of layer 0 are sharded like its other layers",
        ),
        ("--lora-rank 8 --fsdp-cpu-offload", "--lora-rank does not work with --fsdp-cpu-offload"),
        ("--lora-rank 8 --target-modules lm_head", "lm_head would change the embedding too"),
        ("--lora-rank 8 --target-modules lm_head --hf-checkpoint untied --use-dora", "does not work with --use-dora"),
        (
            "--lora-rank 8 --target-modules lm_head --hf-checkpoint untied --lora-dropout 0.1",
            "an adapter of the output layer, does not work with --lora-dropout",
        ),
        (
            "--lora-rank 8 --target-modules lm_head --hf-checkpoint untied --no-lora-merge --rollout-backend sglang",
            "lm_head is the output layer, of which it is sent no adapters",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused_in_a_sentence(house, line, sentence):
    assert any(sentence in each for each in list_problems(line)), list_problems(line)


def test_who_only_answers_is_given_a_checkpoint(house):
    assert any("are for training" in each for each in list_problems("--lora-rank 8", "chat"))


def test_the_memory_plan_counts_moments_of_adapters_alone(house):
    def held(line: str) -> dict[str, int]:
        config = parse(Config, line.split(), read_layers("good.toml")).config
        assert config is not None and config.models.hf_checkpoint is not None
        spec = resolve_spec(config.models.hf_checkpoint, "auto")
        return {share.name: share.bytes for share in estimate_memory(config, build_plan(config), spec)}

    plain, small = held(""), held("--lora-rank 1")
    assert small["optimizer"] == 2 * small["adapters"] == 2 * small["gradients"] < plain["optimizer"]
    assert small["weights"] == plain["weights"] and 0 < small["base"] < small["weights"]
    beside = held("--lora-rank 1 --no-lora-merge")
    assert "base" not in beside and beside["weights"] == plain["weights"]
    assert beside["engine"] == beside["adapters"]  # float32 on a CPU, beside weights that are the trainer's
    assert held("--lora-rank 1 --no-lora-merge --max-weight-staleness 1")["engine"] == beside["engine"]
    critic, adapters = held("--advantage-estimator ppo"), held("--advantage-estimator ppo --lora-rank 1")
    head = adapters["critic"] - small["adapters"]
    assert critic["critic"] > critic["weights"] and 0 < head < 4096
    assert adapters["critic grad"] == adapters["critic"] and adapters["critic adam"] == 2 * adapters["critic"]
    own, shared = held("--use-kl-loss"), held("--use-kl-loss --lora-rank 1")
    assert own["reference"] == own["weights"] and shared["reference"] == shared["adapters"]
