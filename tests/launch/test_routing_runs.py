"""Routing replay through the front door: an engine in bfloat16 beside a trainer in float32."""

import json
from dataclasses import replace

import pytest
import torch
from tests.launch.small_run import flags, write_inputs

from miles.launch.commands import demo_task
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.families import config_from_spec
from miles.models.spec import LayerSpec, MoeSpec


def write_experts(folder, experts=64, layers=4):
    """The small inputs with a model whose routers choose among many experts, which have a say."""
    write_inputs(folder, moe=True)
    made = demo_task.spec(moe=True)
    moe = MoeSpec(num_experts=experts, experts_per_token=2, size=16, norm_topk_prob=True)
    spec = replace(made, layers=(LayerSpec(mixer=made.layers[0].mixer, ffn=moe),) * layers)
    decoder = hf.init_random(spec, seed=1, device="cpu", dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "moe" in name and "router" not in name:
                parameter.mul_(4)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    hf.export(decoder, folder, config=config_from_spec(spec))
    return folder


def rows(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in found if "parity_mean_abs" in row]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_experts(tmp_path_factory.mktemp("inputs") / "start")


def test_replay_leaves_a_small_part_of_the_gap_between_precisions(inputs, tmp_path):
    how = ("--dtype", "float32", "--rollout-dtype", "bfloat16", "--parity-no-replay-interval", "1")
    replayed, plain = tmp_path / "replayed", tmp_path / "plain"
    assert main(["train", *flags(inputs, replayed, *how, "--use-rollout-routing-replay", steps=2, lr="0")]) == 0
    assert main(["train", *flags(inputs, plain, *how, steps=2, lr="0")]) == 0
    for row, other in zip(rows(replayed), rows(plain), strict=True):
        assert row["parity_mean_abs"] < 0.3 * row["parity_mean_abs_no_replay"]
        assert row["parity_mean_abs_no_replay"] == pytest.approx(other["parity_mean_abs"], rel=1e-3)
        assert 0 < row["routing_mismatch_ratio"] < 0.1
        assert "parity_mean_abs_no_replay" not in other and other["expert_imbalance"] > 1


def test_an_engine_of_its_own_precision_also_overlaps_with_the_trainer(inputs, tmp_path):
    run = tmp_path / "run"
    how = ("--dtype", "float32", "--rollout-dtype", "bfloat16", "--max-weight-staleness", "1")
    assert (
        main(["train", *flags(inputs, run, *how, "--use-rollout-routing-replay", "--use-routing-replay", steps=3)]) == 0
    )
    assert all(row["parity_mean_abs"] < 0.05 for row in rows(run))


def test_replay_of_the_trainers_own_experts_is_refused_where_there_are_none(tmp_path, capsys):
    inputs = write_inputs(tmp_path / "dense")
    assert main(["plan", *flags(inputs, tmp_path / "run", "--use-routing-replay")]) == 2
    assert (
        "--use-routing-replay is for mixture-of-experts models, which --hf-checkpoint is not" in capsys.readouterr().err
    )
    foreign = ("--use-routing-replay", "--rollout-dtype", "bfloat16", "--model-impl", "transformers")
    assert main(["plan", *flags(inputs, tmp_path / "run", *foreign)]) == 2
    said = capsys.readouterr().err
    assert (
        "--use-routing-replay needs the native model" in said
        and "--rollout-dtype bfloat16 needs the native model" in said
    )
