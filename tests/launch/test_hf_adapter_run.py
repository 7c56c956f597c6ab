"""Whole runs of models that have no native spec, through the transformers adapter."""

import io
import json

import pytest
import torch
import transformers
from peft import PeftModel
from tests.launch.small_run import everything, flags, miles, write_inputs
from transformers import AutoModelForCausalLM

from miles.launch.main import main

FOREIGN = ("--model-impl", "transformers")
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
KINDS = {
    "granite": ("Granite", {"logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.5, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def furnish(folder, kind):
    """The small inputs, its model replaced by a foreign one of the same vocabulary."""
    inputs = write_inputs(folder)
    config = json.loads((inputs / "config.json").read_text())
    name, own = KINDS[kind]
    ids = {key: config[key] for key in ("vocab_size", "eos_token_id")}
    torch.manual_seed(0)
    made = getattr(transformers, f"{name}Config")(**(SMALL | ids | {"pad_token_id": None, "bos_token_id": None} | own))
    model = getattr(transformers, f"{name}ForCausalLM")(made)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    model.save_pretrained(inputs)
    return inputs


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    return {kind: furnish(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


def rows(run, kind="train"):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_without_a_spec_trains_with_the_parity_light_on(worlds, kind, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(worlds[kind], run, *FOREIGN, steps=3))
    assert done.returncode == 0, done.stderr
    train = rows(run)
    assert len(train) == 3 and all(row["parity_max_abs"] < 1e-4 for row in train)
    last = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "step-000003").state_dict()
    first = AutoModelForCausalLM.from_pretrained(worlds[kind]).state_dict()
    assert last.keys() == first.keys()
    assert any(not torch.equal(last[name], first[name]) for name in last), "training changed nothing"


def test_a_killed_run_continues_to_the_bit(worlds, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    argv = (*FOREIGN, "--gradient-checkpointing")
    done = miles("train", *flags(worlds["granite"], calm, *argv, steps=4))
    assert done.returncode == 0, done.stderr
    killed = miles(
        "train", *flags(worlds["granite"], run, *argv, steps=4), kill_at="miles.train.optim.optimizer:Optimizer.step:6"
    )
    assert killed.returncode < 0
    again = miles("train", *flags(worlds["granite"], run, *argv, steps=4))
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)


LORA = ("--lora-rank", "4", "--lr", "1e-2")


def test_adapters_train_and_engine_and_trainer_agree(worlds, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(worlds["granite"], run, *FOREIGN, *LORA, "--max-weight-staleness", "1", steps=3))
    assert done.returncode == 0, done.stderr
    assert all(row["parity_max_abs"] < 1e-4 for row in rows(run) if "parity_max_abs" in row)
    folder = run / "checkpoints" / "step-000003"
    merged = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    first = AutoModelForCausalLM.from_pretrained(worlds["granite"])
    moved = {name for name, tensor in first.state_dict().items() if not torch.equal(tensor, merged[name])}
    assert moved and all(name.split(".")[-2].endswith("_proj") for name in moved)
    theirs = PeftModel.from_pretrained(first, folder / "adapter").merge_and_unload().state_dict()
    assert all((theirs[name] - merged[name]).abs().max() < 1e-5 for name in moved)


@pytest.mark.slow
def test_adapters_are_published_to_servers(worlds, tmp_path):
    done = miles("train", *flags(worlds["olmoe"], tmp_path, *FOREIGN, *LORA, "--rollout-backend", "served", steps=3))
    assert done.returncode == 0, done.stderr
    assert all(row["parity_max_abs"] < 1e-4 for row in rows(tmp_path))


@pytest.mark.slow
def test_a_killed_run_with_adapters_of_policy_and_critic_continues_to_the_bit(worlds, tmp_path):
    calm, run = tmp_path / "calm", tmp_path / "run"
    more = (*FOREIGN, *LORA, "--advantage-estimator", "ppo")
    done = miles("train", *flags(worlds["olmoe"], calm, *more, steps=4))
    assert done.returncode == 0, done.stderr
    killed = miles(
        "train", *flags(worlds["olmoe"], run, *more, steps=4), kill_at="miles.train.optim.optimizer:Optimizer.step:12"
    )
    assert killed.returncode < 0
    again = miles("train", *flags(worlds["olmoe"], run, *more, steps=4))
    assert again.returncode == 0, again.stderr
    assert everything(run) == everything(calm)


def test_planes_that_overlap_keep_parity_too(worlds, tmp_path):
    run = tmp_path / "run"
    done = miles("train", *flags(worlds["cohere2"], run, *FOREIGN, "--max-weight-staleness", "1", steps=3))
    assert done.returncode == 0, done.stderr
    assert all(row["parity_max_abs"] < 1e-4 for row in rows(run) if "parity_max_abs" in row)


def test_it_is_scored_and_talked_to(worlds, capsys, monkeypatch):
    inputs = worlds["olmoe"]
    argv = (
        "--eval-prompt-data",
        "heldout",
        str(inputs / "heldout.jsonl"),
        "--rm-type",
        "exact",
        "--label-key",
        "label",
    )
    common = ("--device", "cpu", "--num-threads", "1", "--rollout-max-response-len", "5")
    scored = miles("eval", str(inputs), *FOREIGN, *argv, "--apply-chat-template", *common)
    assert scored.returncode == 0, scored.stderr
    assert "eval/heldout/reward" in scored.stdout
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\ncba\n"))
    assert main(["chat", str(inputs), *FOREIGN, *common]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 2


def test_the_plan_says_who_computes_the_model(worlds, tmp_path, capsys):
    argv = flags(worlds["olmoe"], tmp_path / "run", *FOREIGN)
    assert main(["plan", *argv]) == 0
    shown = capsys.readouterr().out
    assert "the module of transformers, slower than the native one" in shown and "active per token" in shown
    assert main(["plan", *argv, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["model"]["architecture"] == "OlmoeForCausalLM"


def test_without_the_flag_it_is_refused_with_the_mend(worlds, tmp_path, capsys):
    assert main(["plan", *flags(worlds["granite"], tmp_path / "run")]) == 2
    output = capsys.readouterr().err
    assert "GraniteForCausalLM" in output and "--model-impl transformers" in output


def test_its_routing_is_not_replayed(worlds, tmp_path, capsys):
    assert main(["plan", *flags(worlds["olmoe"], tmp_path / "run", *FOREIGN, "--use-rollout-routing-replay")]) == 2
    assert "needs the native model; remove it, or --model-impl transformers" in capsys.readouterr().err


def test_a_model_of_ours_can_be_computed_by_transformers_as_well(tmp_path):
    inputs, run = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    done = miles("train", *flags(inputs, run, *FOREIGN, steps=2))
    assert done.returncode == 0, done.stderr
    assert all(row["parity_max_abs"] < 1e-4 for row in rows(run))


def test_a_model_that_does_not_fit_is_one_sentence(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    config = json.loads((inputs / "config.json").read_text())
    ids = {key: config[key] for key in ("vocab_size", "eos_token_id")}
    made = transformers.Lfm2Config(**(SMALL | ids | {"layer_types": ["conv", "full_attention"]}))
    transformers.Lfm2ForCausalLM(made).save_pretrained(inputs)
    done = miles("train", *flags(inputs, tmp_path / "run", *FOREIGN))
    assert done.returncode == 2 and "more than attention" in done.stderr and "Traceback" not in done.stderr
