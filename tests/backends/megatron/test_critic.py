"""PPO on Megatron, policy and critic, against the FSDP backend's in one process."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases, head_cases
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, algo_of, layout
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
