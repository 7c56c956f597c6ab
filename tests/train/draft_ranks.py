"""A policy and its draft, trained in one process or sharded over ranks.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.draft.checkpoint import init_eagle, load_mtp
from miles.models.draft.spec import build_eagle_spec
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK
from miles.train.draft_trainer import DraftTrainer
from miles.train.policy_trainer import PolicyTrainer

TRAIN = TrainConfig(lr=1e-2, adam_eps=1e-2, draft_lr=1e-2, max_tokens_per_gpu=24, draft_train_steps=2)


def trainer_of(
    folder: Path, kind: str | None, mesh: FsdpMesh | None, draft_config: TrainConfig = TRAIN
) -> tuple[PolicyTrainer, Any]:
    """The trainer of the policy in ``folder``, with an EAGLE-3 head, its MTP layers, or no draft."""
    config = hf.read_config(folder)
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    group: Any = SINGLE_RANK if mesh is None else mesh.dp_group
    if mesh is None:
        actor: Any = LocalModel(decoder, config=config, like=folder)
    else:
        actor = load_fsdp_model(folder, decoder.spec, mesh, dtype=torch.float32, config=config, like=folder)
    made = None
    if kind == "mtp":
        made = load_mtp(folder, decoder.spec, device="cpu", dtype=torch.float32)
    elif kind is not None:
        made = init_eagle(build_eagle_spec(decoder.spec), seed=3, device="cpu", dtype=torch.float32)
    draft = None if made is None else DraftTrainer(made, train=draft_config, temperature=1.0, dp_group=group)
    options: Any = {"algo": AlgoConfig(), "train": TRAIN, "steps": 1, "updates": 10, "temperature": 1.0}
    return PolicyTrainer(actor, **options, run=InlineExecutor(), draft=draft, dp_group=group), made


def train(trainer: PolicyTrainer, batches: list[list[Sample]]) -> list[dict[str, float]]:
    return [
        dict(asyncio.run(trainer.step(Batch(step=i, samples=tuple(samples), num_groups=1))).metrics)
        for i, samples in enumerate(batches)
    ]


def sharded(
    rank: int,
    world: int,
    folder: str,
    kind: str | None,
    batches: list[list[Sample]],
    target: str | None = None,
    layout: dict[str, Any] | None = None,
    start: str | None = None,
) -> tuple[list[dict[str, float]], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Train over ``world`` ranks, from the checkpoint ``start`` if there is one; the metrics of each step, this rank's
    policy shards and its draft.
    """
    mesh = FsdpMesh(ParallelDims(world=world, **(layout or {"shard": world})), torch.device("cpu"))
    trainer, draft = trainer_of(Path(folder), kind, mesh)
    if start is not None:
        asyncio.run(trainer.load(Path(start)))
    metrics = train(trainer, batches)
    if target is not None:
        Path(target).mkdir(exist_ok=True)
        asyncio.run(trainer.save(Path(target)))
    policy = {name: value.numpy().copy() for name, value in trainer.weights().items()}
    found = {} if draft is None else {name: p.detach().numpy().copy() for name, p in draft.named_parameters()}
    return metrics, policy, found
