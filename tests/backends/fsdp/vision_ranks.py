"""Functions that test ranks run on samples with images; few imports, since every process repeats them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.fsdp.lora_ranks import fill_factors
from tests.backends.fsdp.sharded_runs import Found, exact, trained
from tests.train.vision_samples import mixed, pack

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.head_models import FsdpCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraBaseModel, LoraModel, UnmergedLoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.activation_checkpointing import RecomputeMode
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK

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


def adapt_alone(folder: str, modules: str, form: Mapping[str, Any]) -> Found:
    """A step of adapters in one process: the oracle."""
    decoder = hf.load(Path(folder), device="cpu", dtype=torch.float32)
    model = _adapt(LocalModel(decoder, frozen=True), folder, modules, form)
    return trained(model, plan_of(share=False, family=decoder.spec.family), SINGLE_RANK, True)


def adapt_ranks(
    rank: int,
    world: int,
    folder: str,
    layouts: Sequence[ParallelDims],
    modules: str,
    form: Mapping[str, Any],
) -> list[Found | None]:
    """The same over ranks, for each layout."""
    found: list[Found | None] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        spec = spec_from_config(hf.read_config(folder))
        base = load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32, frozen=True)
        model = _adapt(base, folder, modules, form)
        plan = plan_of(share=False, family=spec.family)[mesh.dp_group.dp_rank :: mesh.dp_group.dp_size]
        reported = trained(model, plan, mesh.dp_group, True)
        found.append(reported if rank == 0 else None)
    return found


def _adapt(base: LoraBaseModel, folder: str, modules: str, form: Mapping[str, Any]) -> LoraModel:
    lora = LoraSpec(rank=4, alpha=6.0, targets=select_targets(base.spec, modules, None), **form)
    make = UnmergedLoraModel if lora.unmerged else LoraModel
    model = make(base, lora, base=Path(folder), seed=1)
    fill_factors(model)
    return model


def critic_values(rank: int, world: int, folder: str, layout: ParallelDims) -> list[np.ndarray]:
    """The values of every micro-batch; the head is not zero."""
    mesh = FsdpMesh(layout, CPU)
    spec = spec_from_config(hf.read_config(folder))
    critic = FsdpCritic(load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32))
    with torch.no_grad():
        critic.parameters()["value_head.weight"].fill_(0.1)
        kept = critic.forward_backward_values(plan_of(share=False), lambda _, value_R: (None, {"value": value_R}))
    return [each["value"].numpy() for each in kept]
