"""Ranks of a trainer that share one GPU: memory when awake, asleep and with layers on the host.

Imported by the ranks: no transformers here.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

CARD = torch.device("cuda", 0)


def samples(vocabulary: int, count: int = 8) -> tuple[Sample, ...]:
    """Trajectories of many lengths."""
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for number in range(count):
        size = int(rng.integers(8, 40))
        mask = np.arange(size) >= 4
        made.append(
            Sample(
                prompt_id=0,
                trajectory=number,
                tokens=rng.integers(0, vocabulary, size).astype(np.int32),
                mask=mask,
                logprobs=np.where(mask, np.float32(-6.0), np.float32(0)),
                advantages=np.where(mask, np.float32(rng.normal()), np.float32(0)),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return tuple(made)


def trainer(folder: str, world: int, *, tensor: int, cpu_offload: bool = False) -> tuple[PolicyTrainer, int]:
    """One rank's worker with a policy, and a reference that it leaves with; and the vocabulary's size."""
    path = Path(folder)
    spec = spec_from_config(hf.read_config(folder))
    mesh = FsdpMesh(ParallelDims(world=world, tensor=tensor, shard=world // tensor), CARD)
    actor = load_fsdp_model(path, spec, mesh, dtype=torch.bfloat16, cpu_offload=cpu_offload)
    made = PolicyTrainer(
        actor,
        algo=AlgoConfig(use_kl_loss=True, kl_loss_coef=0.1),
        train=TrainConfig(lr=1e-3, max_tokens_per_gpu=128),
        steps=1,
        updates=10,
        temperature=1.0,
        run=InlineExecutor(),
        reference=load_fsdp_model(path, spec, mesh, dtype=torch.bfloat16, frozen=True),
        shares_weights=False,
        dp_group=mesh.dp_group,
    )
    return made, spec.vocab_size


def stepped(worker: PolicyTrainer, vocabulary: int, number: int) -> Mapping[str, float]:
    batch = Batch(step=number, samples=samples(vocabulary), num_groups=1)
    return asyncio.run(worker.step(batch)).metrics


def allocated_bytes() -> int:
    """Bytes of reachable tensors on the GPU."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def warmed() -> None:
    """Have the library of products make its scratch space, which is the process's and not a trainer's."""
    x = torch.ones(64, 64, device=CARD, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).float().sum().backward()
    (x.float() @ x.float()).sum().backward()


def slept(rank: int, world: int, folder: str, tensor: int) -> dict[str, Any]:
    """Two steps with a sleep between them, and the same two without it."""
    warmed()
    empty = allocated_bytes()
    worker, vocabulary = trainer(folder, world, tensor=tensor)
    stepped(worker, vocabulary, 0)
    awake = allocated_bytes() - empty
    asyncio.run(worker.sleep())
    torch.cuda.empty_cache()
    asleep, reserved = allocated_bytes() - empty, torch.cuda.memory_reserved()
    asyncio.run(worker.wake())
    again = allocated_bytes() - empty
    metrics = stepped(worker, vocabulary, 1)
    other, _ = trainer(folder, world, tensor=tensor)
    for number in range(2):
        wanted = stepped(other, vocabulary, number)
    same = all(torch.equal(weight, other.weights()[name]) for name, weight in worker.weights().items())
    return {
        "awake": awake,
        "asleep": asleep,
        "reserved": reserved,
        "again": again,
        "same": same,
        "metrics": dict(metrics),
        "wanted": dict(wanted),
    }


def hosted(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A step whose layers are offloaded to the host, and one that has them on the GPU."""
    results: dict[str, Any] = {}
    for name in ("gpu", "host"):
        before = allocated_bytes()
        worker, vocabulary = trainer(folder, world, tensor=1, cpu_offload=name == "host")
        results[name] = dict(stepped(worker, vocabulary, 0))
        results[f"{name} held"] = allocated_bytes() - before
        results[f"{name} weights"] = {n: w.float().cpu().numpy() for n, w in worker.weights().items()}
        results[f"{name} on"] = {w.device.type for w in worker.weights().values()}
        del worker
    return results
