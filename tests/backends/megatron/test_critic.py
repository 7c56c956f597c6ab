"""PPO on Megatron, policy and critic, against the FSDP backend's in one process."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases, head_cases
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, algo_of, layout
from tests.pool import ranks

from miles.core.types import Batch
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

CASES = [
    Case("qwen3", {}),
    Case("qwen3 untied", {"tensor": 2}),
    Case("qwen3", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"pipeline": 2}),
    Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"context": 2}),
    Case("qwen3 untied", {"shard": 2}),
    Case("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3 untied", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"shard": 2, "expert": 2}),
    Case("deepseek_v3", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    Case("qwen3_moe", {"pipeline": 2, "shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_ppo_step_of_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch = cases.written(tmp_path / "model", case.kind), head_cases.rewarded(case.kind)
    wanted = head_cases.ppo_alone(folder, batch, algo_of(case.kind))
    assert wanted["metrics"]["value_loss"] > 0.01 and wanted["metrics"]["critic_grad_norm"] > 0.1
    assert ("lm_head.weight" in wanted["grads"]) is False
    where = layout(case.sizes)
    for found in ranks(where.world, head_cases.ppo_shared, folder, where, case.flags, batch, algo_of(case.kind), None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)
        assert not cases.apart(found["actor"], wanted["actor"], 1e-4)


PARTS = "all-linear,experts"
ADAPTERS: dict[str, tuple[Case, str | None, dict[str, Any]]] = {
    "one rank": (Case("qwen3", {}), None, {}),
    "tensor": (Case("qwen3 untied", {"tensor": 2}), None, {}),
    "sequence": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {}),
    "recomputed": (Case("qwen3", {"tensor": 2, "sequence": True}, AGAIN), None, {}),
    "pipeline": (Case("qwen3", {"pipeline": 2}), None, {}),
    "interleaved": (Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED), None, {}),
    "context": (Case("qwen3", {"context": 2}), None, {}),
    "data": (Case("qwen3", {"shard": 2}), None, {}),
    "experts": (Case("qwen3_moe", {"shard": 2, "expert": 2}), PARTS, {}),
    "MLA, tensor": (Case("deepseek_v3", {"tensor": 2, "sequence": True}), PARTS, {}),
    "DoRA": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"use_dora": True}),
    "dropout, pipeline": (Case("qwen3", {"pipeline": 2}), None, {"dropout": 0.3}),
    "unmerged": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"unmerged": True}),
    "tensor and pipeline": (Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}), None, {}),
    "shared moments": (Case("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER), None, {}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_ppo_step_of_an_adapter_critic_in_any_layout_is_the_step_of_one_process(tmp_path: Path, name: str):
    case, modules, form = ADAPTERS[name]
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), head_cases.rewarded(case.kind), {}
    lora, where = cases.read_lora(folder, modules, **form), layout(case.sizes)
    wanted = head_cases.adapter_ppo_alone(folder, batch, algo, lora)
    assert wanted["metrics"]["value_loss"] > 0.01 and wanted["metrics"]["critic_grad_norm"] > 0.1
    assert wanted["grads"].keys() == set(wanted["after"]) and "value_head.weight" in wanted["grads"]
    given = (folder, where, case.flags, batch, algo, lora, None)
    for found in ranks(where.world, head_cases.adapter_ppo_shared, *given):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)
        assert not cases.apart(found["actor"], wanted["actor"], 1e-4)


def test_router_balancing_of_the_policy_is_not_in_the_gradients_of_an_adapter_critic(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), head_cases.rewarded("qwen3_moe")
    lora, where = cases.read_lora(folder, "attn"), layout({"shard": 2, "expert": 2})
    wanted = head_cases.adapter_ppo_alone(folder, batch, {}, lora)
    given = (folder, where, ("--moe-aux-loss-coeff", "0.5"), batch, {}, lora, None)
    for found in ranks(2, head_cases.adapter_ppo_shared, *given):
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert abs(found["metrics"]["grad_norm"] - wanted["metrics"]["grad_norm"]) > 1e-3


@pytest.mark.parametrize(
    ("form", "flags"),
    [({}, ()), ({"dropout": 0.3}, ()), ({}, DISTRIBUTED_OPTIMIZER)],
    ids=["LoRA", "dropout", "shared moments"],
)
def test_an_adapter_critic_goes_on_to_the_bit_and_in_one_process(
    tmp_path: Path, form: dict[str, Any], flags: tuple[str, ...]
):
    folder, batch = cases.written(tmp_path / "model", "qwen3 untied"), head_cases.rewarded("qwen3 untied")
    lora, where, kept = cases.read_lora(folder, **form), layout({"tensor": 2, "pipeline": 2}), tmp_path / "kept"
    kept.mkdir()
    for found in ranks(4, head_cases.adapter_ppo_shared, folder, where, flags, batch, {}, lora, kept):
        assert found["resumed"][0] == found["resumed"][1] and found["equal"]
    assert {p.name for p in (kept / "critic").iterdir()} >= {"adapter", "value_head.safetensors"}
    assert not list((kept / "critic").glob("model*.safetensors"))
    own = head_cases.adapter_ppo_alone(folder, batch, {}, lora)["trainer"]
    heir, critic = head_cases.ppo_trainer(*head_cases.local_adapter_pair(folder, lora), SINGLE_RANK, {})
    asyncio.run(heir.load(kept))
    mine, theirs = (dict(c._model.parameters()) for c in (own._critic, critic))
    assert not cases.apart(theirs, mine, 1e-4)


@pytest.mark.parametrize(
    "case",
    [Case("qwen3 untied", {"tensor": 2, "pipeline": 2}), Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER)],
    ids=str,
)
def test_a_critic_goes_on_in_one_process(tmp_path: Path, case: Case):
    folder, batch = cases.written(tmp_path / "model", case.kind), head_cases.rewarded(case.kind)
    for name in ("checkpoint", "critic"):
        (tmp_path / name).mkdir()
    where = layout(case.sizes)
    for found in ranks(where.world, head_cases.ppo_shared, folder, where, case.flags, batch, {}, tmp_path):
        assert all(torch.equal(found["read"][name], found["after"][name]) for name in found["after"])
    saved, trained = (load_file(tmp_path / name / "value_head.safetensors") for name in ("critic", "checkpoint/critic"))
    assert saved.keys() == trained.keys() and all(torch.equal(saved[name], trained[name]) for name in saved)
    own = head_cases.ppo_alone(folder, batch, {})
    heir, critic = head_cases.ppo_trainer(*head_cases.local_pair(folder), SINGLE_RANK, {})
    asyncio.run(heir.load(tmp_path / "checkpoint"))
    for trainer in (own["trainer"], heir):
        asyncio.run(trainer.step(Batch(step=1, samples=head_cases.rewarded(case.kind), num_groups=1)))
    pairs = zip(*(dict(c._model.parameters()).items() for c in (own["trainer"]._critic, critic)), strict=True)
    for (name, one), (_, other) in pairs:
        assert torch.allclose(one, other, atol=1e-3), name
