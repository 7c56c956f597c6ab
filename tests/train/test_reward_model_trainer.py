"""A reward model in training: a step against transformers' classifier, cuts, checkpoints, and what they load as."""

import asyncio
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.train.small_trainer import DENSE, EPS, MOE, SIZES, distance
from tests.train.test_preference import pairs
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, LlamaConfig

from miles.backends.fsdp.lora_reward_model import LoraRewardModel
from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster.executor import InlineExecutor
from miles.core.errors import CheckpointError, UsageError
from miles.core.types import Batch
from miles.models.checkpoint import hf
from miles.models.checkpoint.sequence_classifier import SCORE
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.train.config import TrainConfig
from miles.train.reward_model_trainer import RewardModelTrainer

UNTIED = LlamaConfig(**SIZES | {"tie_word_embeddings": False}, architectures=["LlamaForCausalLM"]).to_dict()


def scorer(config=DENSE, *, seed=0, score=True, dtype=torch.float32):
    model = RewardModel(hf.init_random(spec_from_config(config), seed=seed, device="cpu", dtype=dtype), config=config)
    if score:
        torch.manual_seed(seed)
        model.parameters()[SCORE].data.normal_()
    return model


def trainer(model, *, steps=1, updates=10, **train):
    config = TrainConfig(**({"lr": 1e-2, "adam_eps": EPS, "clip_grad": 0.0, "weight_decay": 0.0} | train))
    return RewardModelTrainer(model, train=config, steps=steps, updates=updates, run=InlineExecutor())


def step(made, samples, number=0):
    return asyncio.run(made.step(Batch(step=number, samples=tuple(samples), num_groups=1))).metrics


def weights(made):
    return {name: value.clone() for name, value in made.weights().items()}


def classifier(folder: Path):
    return AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32, attn_implementation="eager"
    )


def scores(theirs, samples):
    return torch.stack([theirs(torch.from_numpy(s.tokens).long()[None]).logits[0, 0] for s in samples])


@pytest.mark.parametrize("config", [DENSE, MOE, UNTIED], ids=["qwen3", "qwen3_moe", "llama"])
def test_its_folder_is_a_classifier_to_the_bit(config, tmp_path):
    mine, samples = scorer(config), pairs(3)
    mine.save(tmp_path)
    theirs, reported = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=1, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not reported["missing_keys"] and not reported["mismatched_keys"]
    assert set(reported["unexpected_keys"]) <= {"lm_head.weight"}
    assert type(theirs).__name__ == theirs.config.architectures[0]
    assert torch.equal(theirs.score.weight, mine.parameters()[SCORE])
    for s in samples:
        tokens = torch.from_numpy(s.tokens).long()
        found = mine.scores(tokens, torch.arange(len(tokens)), (len(tokens),))
        assert found.item() == pytest.approx(theirs(tokens[None]).logits.item(), abs=1e-5)
    own = {name: tensor for name, tensor in theirs.state_dict().items() if name != SCORE}
    exported = dict(hf.iter_hf_tensors(mine._decoder))
    assert all(torch.equal(tensor, exported[name]) for name, tensor in own.items() if name in exported)
    assert own.keys() - exported.keys() <= {name for name in own if "experts" in name}


def test_a_step_equals_its_transformers_twin(tmp_path):
    model, samples = scorer(), pairs()
    model.save(tmp_path)
    theirs = classifier(tmp_path)
    made = trainer(model, max_tokens_per_gpu=32)
    report = step(made, samples)
    found = scores(theirs, samples)
    margins = found[::2] - found[1::2]
    loss = -logsigmoid(margins).mean()
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    loss.backward()
    adam.step()
    assert report["micro_batches"] > 1
    assert report["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert report["rm_accuracy"] == pytest.approx((margins > 0).float().mean().item())
    expected = {name: value.detach() for name, value in theirs.state_dict().items()}
    after = {SCORE: made.weights()[SCORE], **dict(hf.iter_hf_tensors(model._decoder))}
    assert distance({name: after[name] for name in expected}, expected) < 1e-5


@pytest.mark.parametrize("train", [{"max_tokens_per_gpu": 32}, {"micro_batch_size": 2}])
def test_a_batch_may_be_cut_and_turned_between_pairs(train):
    samples = pairs(6)
    turned = [s for at in (2, 0, 1, 5, 3, 4) for s in samples[2 * at : 2 * at + 2]]
    one, other = trainer(scorer(), steps=2), trainer(scorer(), steps=2, **train)
    whole, parts = step(one, samples), step(other, turned)
    assert parts["micro_batches"] > whole["micro_batches"] == 2
    for metric in ("loss", "rm_margin", "rm_accuracy", "grad_norm"):
        assert parts[metric] == pytest.approx(whole[metric], rel=1e-5, abs=1e-6)
    assert distance(weights(one), weights(other)) < 1e-6


@pytest.mark.parametrize("config", [DENSE, UNTIED], ids=["tied", "untied"])
def test_it_goes_on_from_a_checkpoint_to_the_bit(config, tmp_path):
    samples = pairs(4)
    first = trainer(scorer(config))
    step(first, samples)
    asyncio.run(first.save(tmp_path))
    step(first, samples, 1)
    second = trainer(scorer(config, seed=5))
    asyncio.run(second.load(tmp_path))
    assert second.version.number == 1
    step(second, samples, 1)
    assert distance(weights(first), weights(second)) == 0


def test_a_new_one_finds_all_replies_alike_and_learns_which_are_chosen():
    made, samples = trainer(scorer(score=False), updates=40, adam_eps=1e-8), pairs(4)
    reports = [step(made, samples, number) for number in range(40)]
    assert reports[0]["loss"] == pytest.approx(0.693147, abs=1e-5) and reports[0]["rm_accuracy"] == 0
    assert reports[-1]["rm_accuracy"] == 1 and reports[-1]["loss"] < 0.3


def lora_scorer(folder, config=DENSE, *, rank=2, **lora):
    """The scorer under adapters, over a base that is written to ``folder``."""
    decoder = hf.init_random(spec_from_config(config), seed=0, device="cpu", dtype=torch.float32)
    hf.export(decoder, folder, config=config)
    model = RewardModel(decoder, config=config)
    targets = select_targets(spec_from_config(config), "all-linear", None)
    return LoraRewardModel(model, LoraSpec(rank=rank, alpha=4.0, targets=targets, **lora), base=folder, seed=1)


def factors_of(model):
    return {**model.adapters().parameters, SCORE: model.parameters()[SCORE]}


def peft_classifier(base: Path, adapter: Path):
    return PeftModel.from_pretrained(classifier(base), adapter, is_trainable=True)


@pytest.mark.parametrize("lora", [{}, {"use_dora": True}], ids=["lora", "dora"])
def test_a_step_with_adapters_equals_that_of_the_peft_library(tmp_path, lora):
    model, samples = lora_scorer(tmp_path / "base", **lora), pairs()
    made = trainer(model, max_tokens_per_gpu=32)
    for number in range(2):
        step(made, samples, number)
    kept = tmp_path / "kept"
    kept.mkdir()
    asyncio.run(made.save(kept))
    theirs = peft_classifier(tmp_path / "base", kept / "adapter")
    named = {n.replace(".default.", ".").replace("modules_to_save.", ""): p for n, p in theirs.named_parameters()}
    for s in samples:
        tokens = torch.from_numpy(s.tokens).long()
        found = model._reward_model.scores(tokens, torch.arange(len(tokens)), (len(tokens),)).item()
        assert found == pytest.approx(theirs(tokens[None]).logits.item(), abs=1e-5)
        assert found == pytest.approx(classifier(kept)(tokens[None]).logits.item(), abs=1e-5)
    (tmp_path / "saved").mkdir()
    model.save(tmp_path / "saved")
    sharded, whole = (load_file(f / "adapter" / "adapter_model.safetensors") for f in (kept, tmp_path / "saved"))
    assert sharded.keys() == whole.keys() and all(torch.equal(sharded[n], whole[n]) for n in whole)
    report = step(made, samples, 2)
    found = scores(theirs, samples)
    loss = -logsigmoid(found[::2] - found[1::2]).mean()
    loss.backward()
    assert report["loss"] == pytest.approx(loss.item(), abs=1e-5)
    trained = [named["base_model.model." + (n + ".weight" if "magnitude" in n else n)].grad for n in factors_of(model)]
    norm = torch.stack([grad.norm() for grad in trained]).norm()
    assert report["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


@pytest.mark.parametrize("lora", [{}, {"dropout": 0.3}, {"use_dora": True}], ids=["lora", "dropout", "dora"])
def test_a_reward_model_with_adapters_goes_on_from_a_checkpoint_to_the_bit(lora, tmp_path):
    samples = pairs(4)
    first, second = (lora_scorer(tmp_path / f"base{n}", **lora) for n in range(2))
    one, two = trainer(first, optimizer="muon"), trainer(second, optimizer="muon")
    step(one, samples)
    (tmp_path / "kept").mkdir()
    asyncio.run(one.save(tmp_path / "kept"))
    asyncio.run(two.load(tmp_path / "kept"))
    for number in (1, 2):
        assert step(one, samples, number) == step(two, samples, number)
    assert distance(first.parameters(), second.parameters()) == 0
    assert first.parameters()["embedding.weight"].grad is None


def test_adapters_and_head_learn_which_replies_are_chosen(tmp_path):
    made, samples = trainer(lora_scorer(tmp_path, rank=4), updates=40, adam_eps=1e-8), pairs(4)
    reports = [step(made, samples, number) for number in range(40)]
    assert reports[0]["loss"] == pytest.approx(0.693147, abs=1e-5)
    assert reports[-1]["rm_accuracy"] == 1 and reports[-1]["loss"] < 0.4


def test_padding_that_is_an_end_is_left_out_of_the_config(tmp_path):
    scorer(DENSE | {"pad_token_id": 7, "eos_token_id": 7}).save(tmp_path)
    assert hf.read_config(tmp_path)["pad_token_id"] is None


def test_what_is_no_reward_model_is_refused(tmp_path):
    model = scorer()
    hf.export(
        hf.init_random(spec_from_config(DENSE), seed=0, device="cpu", dtype=torch.float32), tmp_path, config=DENSE
    )
    with pytest.raises(CheckpointError, match=r"has no score\.weight"):
        model.load(tmp_path)
    decoder = hf.init_random(spec_from_config(DENSE), seed=0, device="cpu", dtype=torch.float32)
    with pytest.raises(UsageError, match="cannot write a reward model of type unheard_of"):
        RewardModel(decoder, config=DENSE | {"model_type": "unheard_of"})
