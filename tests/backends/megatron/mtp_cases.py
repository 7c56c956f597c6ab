"""A policy with MTP layers on Megatron's ranks. Imported by the ranks: no transformers here."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.train.draft_ranks import TRAIN, train

from miles.algo.config import AlgoConfig
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Sample
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.draft.checkpoint import load_mtp
from miles.models.families import spec_from_config
from miles.train.draft_trainer import DraftTrainer
from miles.train.policy_trainer import PolicyTrainer

Found = tuple[list[dict[str, float]], dict[str, np.ndarray], dict[str, np.ndarray]]


def train_mtp(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batches: list[list[Sample]],
    with_draft: bool,
    target: Path | None = None,
    start: Path | None = None,
) -> Found:
    """The metrics of each step, the whole policy and this rank's MTP layers after them."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        config = read_config(folder)
        spec = spec_from_config(config)
        model = load_megatron_model(folder, spec, layout, dtype=torch.float32, flags=flags, config=config)
        try:
            made, draft, group = None, None, model.dp_group
            if with_draft:
                made = load_mtp(folder, spec, device="cpu", dtype=torch.float32)
                draft = DraftTrainer(made, train=TRAIN, temperature=1.0, dp_group=group, pipeline_size=layout.pipeline)
            options: Any = {"algo": AlgoConfig(), "train": TRAIN, "steps": 1, "updates": 10, "temperature": 1.0}
            trainer = PolicyTrainer(model, **options, run=InlineExecutor(), draft=draft, dp_group=group)
            if start is not None:
                asyncio.run(trainer.load(start))
            metrics = train(trainer, batches)
            if target is not None:
                asyncio.run(trainer.save(target))
                model.barrier()
            policy = {n: model.gather(n, p.detach()).numpy().copy() for n, p in model.parameters().items()}
            mtp = {} if made is None else {n: p.detach().numpy().copy() for n, p in made.named_parameters()}
            return metrics, policy, mtp
        finally:
            destroy_parallel_state()
