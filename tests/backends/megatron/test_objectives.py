"""SFT, DPO and distillation from loaded teachers on Megatron, against the FSDP backend in one process."""

import asyncio
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import INTERLEAVED, Case, layout
from tests.pool import ranks
from tests.train.small_trainer import EPS, worker
from tests.train.test_preference import pairs

from miles.algo.distillation_loss import TEACHER_INDEX
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"loss_type": "sft_loss"},
    "dpo": {"loss_type": "dpo_loss", "dpo_beta": 0.5},
    "distillation, sampled": {"advantage_estimator": "on_policy_distillation"},
    "distillation, exact": {"advantage_estimator": "on_policy_distillation", "opd_log_prob_top_k": -1},
}
LAYOUTS = [
    Case("qwen3", {"pipeline": 2}),
    Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"context": 2}),
    Case("qwen3 untied", {"shard": 2}),
    Case("qwen3_moe", {"pipeline": 2, "shard": 2, "expert": 2}),
]


def batch_of(name: str) -> tuple[Sample, ...]:
    if name == "dpo":
        return tuple(pairs())
    found = cases.samples("qwen3")
    if name == "sft":
        return found
    # Two teachers; the last samples have the first one only.
    indices = (0, 1, 1, 0, 0, 0)
    return tuple(
        replace(s, extras={TEACHER_INDEX: np.full(len(s), n, np.int16)}) for s, n in zip(found, indices, strict=True)
    )


def stepped(model: Any, others: list[Any], dp_group: Any, name: str, batch: tuple[Sample, ...]) -> dict[str, Any]:
    train = {"max_tokens_per_gpu": 24, "adam_eps": EPS, "lr": 1e-2, "weight_decay": 0.5, "clip_grad": 0.1}
    more = {"dpo": {"reference": others[0]}, "sft": {}}.get(name, {"teachers": others})
    trainer = worker(model, algo=OBJECTIVES[name], train=train, temperature=0.9, dp_group=dp_group, **more)
    grads = cases.watch(model, trainer)
    report = asyncio.run(trainer.step(Batch(step=0, samples=batch, num_groups=1)))
    after = {n: model.gather(n, p.detach()).clone() for n, p in model.parameters().items()}
    return {"metrics": dict(report.metrics), "grads": grads, "after": after}


def alone(folders: list[Path], name: str, batch: tuple[Sample, ...]) -> dict[str, Any]:
    models = [hf.load(folder, device="cpu", dtype=torch.float32) for folder in folders]
    actor, *others = [
        LocalModel(m, config=read_config(f), frozen=n > 0) for n, (m, f) in enumerate(zip(models, folders, strict=True))
    ]
    return stepped(actor, others, SINGLE_RANK, name, batch)


def shared(
    rank: int,
    world: int,
    folders: list[Path],
    where: ParallelDims,
    flags: tuple[str, ...],
    name: str,
    batch: tuple[Sample, ...],
) -> dict[str, Any]:
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folders[0]))
        try:
            actor, *others = [
                load_megatron_model(f, spec, where, dtype=torch.float32, flags=flags, frozen=n > 0)
                for n, f in enumerate(folders)
            ]
            return stepped(actor, others, actor.dp_group, name, batch)
        finally:
            destroy_parallel_state()


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("case", LAYOUTS, ids=str)
def test_a_step_of_any_objective_and_layout_is_the_step_of_one_process(tmp_path: Path, case: Case, name: str):
    folders = [cases.written(tmp_path / str(seed), case.kind, seed=seed) for seed in range(3)]
    batch = batch_of(name)
    wanted = alone(folders, name, batch)
    metric = {"sft": "loss", "dpo": "loss"}.get(name, "distill_kl")
    assert abs(wanted["metrics"][metric]) > 0.001 and wanted["metrics"]["micro_batches"] > 1
    where = layout(case.sizes)
    for found in ranks(where.world, shared, folders, where, case.flags, name, batch):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)
