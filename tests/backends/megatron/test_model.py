"""Megatron's models against the FSDP backend's model in one process, in every parallel layout."""

import asyncio
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

INTERLEAVED = ("--virtual-pipeline-model-parallel-size", "2")
DISTRIBUTED_OPTIMIZER = ("--use-distributed-optimizer",)
AGAIN = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")


@dataclass(frozen=True)
class Case:
    kind: str
    sizes: dict[str, Any]
    flags: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.kind, *(f"{name}{size}" for name, size in self.sizes.items()), *self.flags])


CASES = [
    Case("qwen3", {}),
    Case("qwen3", {"tensor": 2}),
    Case("qwen3", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"pipeline": 2}),
    Case("qwen3 untied", {"pipeline": 2}),
    Case("qwen3", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"context": 2}),
    Case("qwen3", {"shard": 2}),
    Case("qwen3", {"context": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"pipeline": 2}, (*INTERLEAVED, *DISTRIBUTED_OPTIMIZER)),
    Case("qwen3", {"pipeline": 2}, ("--num-layers-in-first-pipeline-stage", "1")),
    Case("qwen3 one key", {"tensor": 2}),
    Case("qwen2", {"tensor": 2}),
    Case("llama", {"tensor": 2, "sequence": True}),
    Case("qwen3_moe", {"shard": 2, "expert": 2}),
    Case("qwen3_moe", {"context": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"context": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 1}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"tensor": 2, "sequence": True}),
    Case("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 1}),
    Case("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 1, "expert": 2}),
    Case("qwen3_moe", {"pipeline": 2}, AGAIN),
    Case("qwen2_moe", {"shard": 2, "expert": 2}),
    Case("deepseek_v3", {"tensor": 2, "sequence": True}),
    Case("deepseek_v3", {"context": 2, "expert": 2}),
    Case("deepseek_v3", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    Case("qwen3", {"pipeline": 2, "shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"pipeline": 2, "shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"tensor": 2, "context": 2, "expert": 2, "sequence": True}),
    Case(
        "qwen3_moe", {"tensor": 2, "shard": 2, "expert": 2, "sequence": True, "expert_tensor": 1}, DISTRIBUTED_OPTIMIZER
    ),
]


def layout(sizes: dict[str, Any]) -> ParallelDims:
    world = 1
    for name in ("tensor", "pipeline", "context", "shard"):
        world *= sizes.get(name, 1)
    return ParallelDims(world=world, **sizes)


def algo_of(kind: str) -> dict[str, Any]:
    return {"use_rollout_routing_replay": True} if kind in cases.ROUTED else {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    wanted = cases.alone(folder, batch, algo)
    where = layout(case.sizes)
    for found in ranks(where.world, cases.shared, folder, where, case.flags, batch, algo, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)
    if case.kind in cases.ROUTED:
        assert wanted["metrics"]["routing_mismatch_ratio"] > 0.1


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe", "deepseek_v3"])
def test_log_probs_are_those_of_transformers(tmp_path: Path, kind: str):
    folder, batch = cases.written(tmp_path / "model", kind), cases.samples(kind)
    for found in ranks(2, cases.logprobs_of, folder, layout({"pipeline": 2}), batch, torch.float32, False):
        assert torch.allclose(found, cases.oracle_of(folder, batch), atol=1e-5)


def test_what_samples_begin_with_is_read_once_where_asked(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3"), cases.together()
    for sizes in ({"tensor": 2, "sequence": True}, {"context": 2}):
        for found in ranks(2, cases.logprobs_of, folder, layout(sizes), batch, torch.float32, True):
            assert torch.allclose(found, cases.oracle_of(folder, batch), atol=1e-5)


@pytest.mark.parametrize("flags", [(), DISTRIBUTED_OPTIMIZER], ids=["ours", "distributed optimizer"])
def test_half_precision_is_near_and_trains_float32_masters(tmp_path: Path, flags: tuple[str, ...]):
    folder, batch = cases.written(tmp_path / "model", "qwen3_moe"), cases.samples("qwen3_moe")
    sizes = {"context": 2, "expert": 2}
    found = ranks(2, cases.logprobs_of, folder, layout(sizes), batch, torch.bfloat16, False)[0]
    assert torch.allclose(found, cases.oracle_of(folder, batch), atol=0.05)
    algo = algo_of("qwen3_moe")
    wanted = cases.alone(folder, batch, algo)
    for made in ranks(2, cases.shared, folder, layout(sizes), flags, batch, algo, None, torch.bfloat16):
        kept = torch.bfloat16 if flags else torch.float32  # Megatron's masters are its optimizer's own
        assert all(p.dtype == kept for p in made["after"].values())
        assert not cases.apart(made["after"], wanted["after"], 0.05)
        assert made["metrics"]["grad_norm"] == pytest.approx(wanted["metrics"]["grad_norm"], rel=0.05)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3", {"tensor": 2, "pipeline": 2}),
        Case("qwen3_moe", {"shard": 2, "expert": 2, "tensor": 2, "sequence": True}),
        Case("qwen3_moe", {"context": 2}, DISTRIBUTED_OPTIMIZER),
        Case("deepseek_v3", {"tensor": 2, "sequence": True}),
    ],
    ids=str,
)
def test_what_was_read_is_written_bit_for_bit_and_training_goes_on_elsewhere(tmp_path: Path, case: Case):
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    (tmp_path / "checkpoint").mkdir()
    where = layout(case.sizes)
    ranks(where.world, cases.shared, folder, where, case.flags, batch, algo, tmp_path)
    read, made = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert read.keys() == made.keys() and all(torch.equal(read[name], made[name]) for name in read)
    # One process takes over the checkpoint; another made the same first step itself.
    own = cases.alone(folder, batch, algo)["trainer"]
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    heir = cases.trainer_of(LocalModel(decoder, config=read_config(folder)), algo, cases.SINGLE_RANK)
    asyncio.run(heir.load(tmp_path / "checkpoint"))
    assert heir.version == own.version
    assert not cases.apart(dict(heir.weights()), dict(own.weights()), 1e-4)
    for trainer in (own, heir):
        asyncio.run(trainer.step(Batch(step=1, samples=cases.samples(case.kind, 4), num_groups=1)))
    assert not cases.apart(dict(heir.weights()), dict(own.weights()), 1e-3)


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ({"context": 2, "expert": 2}, {"pipeline": 2}),
        ({"tensor": 2, "pipeline": 2, "sequence": True}, {"shard": 4, "expert": 4}),
        ({"shard": 4}, {"tensor": 2, "pipeline": 2, "sequence": True}),
    ],
    ids=str,
)
def test_megatrons_own_checkpoint_is_read_by_another_layout(tmp_path: Path, made: dict[str, Any], read: dict[str, Any]):
    folder = cases.written(tmp_path / "model", "qwen3_moe")
    ranks(layout(made).world, cases.handed, folder, layout(made), layout(read), tmp_path)
    wanted, found = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_short_run_learns_as_in_one_process(tmp_path: Path):
    folder = cases.written(tmp_path / "model", "qwen3")
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    wanted = cases.learnt(LocalModel(decoder), spec_from_config(read_config(folder)), cases.SINGLE_RANK, 12)
    assert wanted[-1] > wanted[0] + 0.2
    found = ranks(2, cases.learnt_shared, folder, layout({"pipeline": 2}), 12)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(wanted, abs=0.1)
