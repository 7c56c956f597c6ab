"""Reward models on Megatron, against the FSDP backend in one process and transformers' classifier."""

import asyncio
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from tests.backends.megatron import cases, head_cases
from tests.backends.megatron.adapter_dist_cases import train_adapters_and_save
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, layout
from tests.backends.megatron.torch_dist_cases import train_and_save
from tests.pool import ranks
from tests.train.test_preference import pairs
from transformers import AutoModelForSequenceClassification

from miles.backends.fsdp.lora_reward_model import LoraRewardModel
from miles.core.types import Batch
from miles.launch.main import main
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

CASES = [
    Case("qwen3", {}),
    Case("qwen3 untied", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"pipeline": 2}),
    Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"context": 2}),
    Case("qwen3 untied", {"shard": 2}),
    Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"tensor": 2, "pipeline": 2}),
    Case("qwen3_moe", {"pipeline": 2, "shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_a_reward_model_in_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch = cases.written(tmp_path / "model", case.kind), tuple(pairs())
    wanted = head_cases.reward_step(head_cases.local_reward_model(folder), SINGLE_RANK, batch)
    assert wanted["metrics"]["grad_norm"] > 0.1 and wanted["metrics"]["micro_batches"] > 1
    where = layout(case.sizes)
    for found in ranks(where.world, head_cases.reward_shared, folder, where, case.flags, batch, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


def test_ranks_without_a_pair_keep_in_step(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), tuple(pairs(1))
    wanted = head_cases.reward_step(head_cases.local_reward_model(folder), SINGLE_RANK, batch)
    where = layout({"shard": 2, "expert": 2})
    for found in ranks(2, head_cases.reward_shared, folder, where, (), batch, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3 untied"])
def test_its_folder_is_transformers_classifier_and_training_goes_on_in_one_process(tmp_path: Path, kind: str):
    folder, batch = cases.written(tmp_path / "model", kind), tuple(pairs())
    for name in ("checkpoint", "saved"):
        (tmp_path / name).mkdir()
    where = layout({"tensor": 2, "pipeline": 2})
    for found in ranks(4, head_cases.reward_shared, folder, where, (), batch, tmp_path):
        assert all(torch.equal(found["read"][name], found["after"][name]) for name in found["after"])
    own = head_cases.reward_step(head_cases.local_reward_model(folder), SINGLE_RANK, batch)["trainer"]
    heir_model = head_cases.local_reward_model(folder)
    heir = head_cases.reward_trainer(heir_model, SINGLE_RANK)
    asyncio.run(heir.load(tmp_path / "checkpoint"))
    for name in ("checkpoint", "saved"):
        theirs = AutoModelForSequenceClassification.from_pretrained(
            tmp_path / name, num_labels=1, dtype=torch.float32, attn_implementation="eager"
        )
        for s in batch:
            tokens = torch.from_numpy(s.tokens).long()
            found = heir_model.scores(tokens, torch.arange(len(tokens)), (len(tokens),))
            assert found.item() == pytest.approx(theirs(tokens[None]).logits.item(), abs=1e-5)
    for trainer in (own, heir):
        asyncio.run(trainer.step(Batch(step=1, samples=batch, num_groups=1)))
    assert not cases.apart(dict(heir.weights()), dict(own.weights()), 1e-3)


PARTS = "all-linear,experts"
ADAPTERS: dict[str, tuple[Case, str | None, dict[str, Any]]] = {
    "one rank": (Case("qwen3", {}), None, {}),
    "sequence": (Case("qwen3 untied", {"tensor": 2, "sequence": True}), None, {}),
    "tensor": (Case("qwen3", {"tensor": 2}), None, {}),
    "pipeline": (Case("qwen3", {"pipeline": 2}), None, {}),
    "interleaved": (Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED), None, {}),
    "context": (Case("qwen3", {"context": 2}), None, {}),
    "data": (Case("qwen3 untied", {"shard": 2}), None, {}),
    "experts": (Case("qwen3_moe", {"shard": 2, "expert": 2}), PARTS, {}),
    "MLA": (Case("deepseek_v3", {"tensor": 2, "sequence": True}), PARTS, {}),
    "DoRA": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"use_dora": True}),
    "dropout": (Case("qwen3", {"pipeline": 2}), None, {"dropout": 0.3}),
    "tensor and pipeline": (Case("qwen3", {"tensor": 2, "pipeline": 2}), None, {}),
    "shared moments": (Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER), None, {}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_step_of_adapters_under_a_score_in_any_layout_is_the_step_of_one_process(tmp_path: Path, name: str):
    case, modules, form = ADAPTERS[name]
    folder, batch = cases.written(tmp_path / "model", case.kind), tuple(pairs())
    lora, where = cases.read_lora(folder, modules, **form), layout(case.sizes)
    model = head_cases.adapted_reward_model(head_cases.local_reward_model(folder), folder, lora)
    wanted = head_cases.reward_step(model, SINGLE_RANK, batch)
    assert wanted["metrics"]["grad_norm"] > 0.1 and wanted["metrics"]["micro_batches"] > 1
    assert wanted["grads"].keys() == {n for n in wanted["after"] if ".lora_" in n} | {"score.weight"}
    given = (folder, where, case.flags, batch, lora, None)
    for found in ranks(where.world, head_cases.adapted_reward_shared, *given):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


@pytest.mark.parametrize("form", [{}, {"dropout": 0.3}, {"use_dora": True}], ids=["LoRA", "dropout", "DoRA"])
def test_adapters_under_a_score_go_on_to_the_bit_and_are_those_of_the_peft_library(
    tmp_path: Path, form: dict[str, Any]
):
    folder, batch, kept = cases.written(tmp_path / "model", "qwen3 untied"), tuple(pairs()), tmp_path / "kept"
    lora, where = cases.read_lora(folder, **form), layout({"tensor": 2, "pipeline": 2})
    kept.mkdir()
    for found in ranks(4, head_cases.adapted_reward_shared, folder, where, (), batch, lora, kept):
        assert found["resumed"][0] == found["resumed"][1] and found["equal"]
    heir_model = LoraRewardModel(head_cases.local_reward_model(folder), lora, base=folder, seed=1)
    asyncio.run(head_cases.reward_trainer(heir_model, SINGLE_RANK).load(kept))
    how: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "attn_implementation": "eager"}
    merged = AutoModelForSequenceClassification.from_pretrained(kept, **how)
    base = AutoModelForSequenceClassification.from_pretrained(folder, **how)
    theirs = PeftModel.from_pretrained(base, kept / "adapter")
    for s in batch:
        tokens = torch.from_numpy(s.tokens).long()
        with torch.no_grad():
            found = heir_model._reward_model.scores(tokens, torch.arange(len(tokens)), (len(tokens),)).item()
        assert found == pytest.approx(merged(tokens[None]).logits.item(), abs=1e-5)
        assert found == pytest.approx(theirs(tokens[None]).logits.item(), abs=1e-5)


DIST: dict[str, tuple[Case, dict[str, Any], dict[str, Any] | None]] = {
    "ours": (Case("qwen3 untied", {"tensor": 2, "sequence": True}), {"pipeline": 2}, None),
    "Megatron's optimizer": (Case("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER), {"tensor": 2}, None),
    "experts": (Case("qwen3_moe", {"shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER), {"pipeline": 2}, None),
    "adapters": (Case("qwen3 untied", {"tensor": 2, "pipeline": 2}), {"tensor": 2, "sequence": True}, {}),
    "DoRA": (Case("qwen3", {"tensor": 2, "sequence": True}), {"pipeline": 2}, {"use_dora": True}),
}


@pytest.mark.parametrize("name", DIST)
def test_megatrons_checkpoint_of_a_reward_model_resumes_and_is_converted(tmp_path: Path, name: str):
    case, read, form = DIST[name]
    folder, batch = cases.written(tmp_path / "model", case.kind), tuple(pairs())
    lora = None if form is None else cases.read_lora(folder, **form)
    (saved := tmp_path / "saved").mkdir()
    where, there = layout(case.sizes), layout(read)
    run = partial(head_cases.reward_torch_dist, resume=False, background=name == "adapters")
    wanted = ranks(where.world, run, folder, where, case.flags, batch, lora, saved)[0]
    assert (saved / ".metadata").is_file() and not list(saved.glob("model*.safetensors"))
    resume = partial(head_cases.reward_torch_dist, resume=True)
    found = ranks(where.world, resume, folder, where, case.flags, batch, lora, saved)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    found = ranks(there.world, resume, folder, there, case.flags, batch, lora, saved)[0]
    assert not cases.apart(found, wanted, 1e-4)
    # The FSDP trainer's reward model after the same step, which transformers' classifier has when it is converted.
    own: Any = head_cases.local_reward_model(folder)
    local = own if lora is None else head_cases.adapted_reward_model(own, folder, lora)
    head_cases.fill_head(local)
    asyncio.run(head_cases.reward_trainer(local, SINGLE_RANK).step(Batch(step=0, samples=batch, num_groups=1)))
    assert main(["convert", str(saved), str(tmp_path / "out"), "--format", "float32"]) == 0
    how: dict[str, Any] = {"num_labels": 1, "dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", **how)
    for s in batch:
        tokens = torch.from_numpy(s.tokens).long()
        with torch.no_grad():
            score = own.scores(tokens, torch.arange(len(tokens)), (len(tokens),)).item()
            assert theirs(tokens[None]).logits.item() == pytest.approx(score, abs=1e-4)
        assert abs(score) > 1e-3


@pytest.mark.parametrize("form", [None, {}], ids=["weights", "adapters"])
def test_megatrons_checkpoint_of_a_policy_is_no_reward_model(tmp_path: Path, form: dict[str, Any] | None):
    folder, where = cases.written(tmp_path / "model", "qwen3"), layout({})
    (saved := tmp_path / "saved").mkdir()
    lora = None if form is None else cases.read_lora(folder, **form)
    if lora is None:
        batches = (cases.samples("qwen3"),)
        ranks(1, train_and_save, folder, where, DISTRIBUTED_OPTIMIZER, batches, saved)
        (said,) = ranks(1, head_cases.load_reward_model, folder, where, lora, saved)
        assert f"{saved} has no score.weight of 16 columns, so it is not this reward model" in said
        return
    ranks(1, train_adapters_and_save, folder, where, lora, "qwen3", saved)
    (said,) = ranks(1, head_cases.load_reward_model, folder, where, lora, saved)
    assert f"{saved} has no score.weight" in said
