"""Functions that test ranks run on samples with images; few imports, since every process repeats them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.fsdp.sharded_runs import Found, exact, trained
from tests.train.vision_samples import mixed, pack

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.head_models import FsdpCritic
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.activation_checkpointing import RecomputeMode
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.train.batch_tensors import MicroBatch

CPU = torch.device("cpu")
PARTS = ((0, 1, 2), (6,), (3, 4), (5,))
"""The samples of four micro-batches; the second has text only."""


def plan_of(*, share: bool, family: str = "") -> list[MicroBatch]:
    samples = mixed(family)
    return [pack(samples, part, share=share) for part in PARTS]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and how the model is trained in it."""

    layout: ParallelDims
    share: bool = False
    recompute: RecomputeMode = "none"
    frozen: FrozenVision = TRAINED_VISION
    batch_invariant: bool = False


def train_ranks(rank: int, world: int, folder: str, cases: Sequence[Case]) -> list[Found | None]:
    """One step of each case; only the first rank tells all."""
    whole = dict(hf.load(Path(folder), device="cpu", dtype=torch.float32).named_parameters())
    found: list[Found | None] = []
    for case in cases:
        mesh = FsdpMesh(case.layout, CPU, numerics=BATCH_INVARIANT if case.batch_invariant else FAST)
        spec = spec_from_config(hf.read_config(folder))
        model = load_fsdp_model(
            Path(folder),
            spec,
            mesh,
            dtype=torch.float32,
            recompute=case.recompute,
            frozen_vision=case.frozen,
        )
        plan = plan_of(share=case.share, family=spec.family)[mesh.dp_group.dp_rank :: mesh.dp_group.dp_size]
        reported = trained(model, plan, mesh.dp_group, exact(model, whole))
        found.append(reported if rank == 0 else None)
    return found


def critic_values(rank: int, world: int, folder: str, layout: ParallelDims) -> list[np.ndarray]:
    """The values of every micro-batch; the head is not zero."""
    mesh = FsdpMesh(layout, CPU)
    spec = spec_from_config(hf.read_config(folder))
    critic = FsdpCritic(load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32))
    with torch.no_grad():
        critic.parameters()["value_head.weight"].fill_(0.1)
        kept = critic.forward_backward_values(plan_of(share=False), lambda _, value_R: (None, {"value": value_R}))
    return [each["value"].numpy() for each in kept]
