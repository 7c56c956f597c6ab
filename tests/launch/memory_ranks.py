"""What ranks of a layout hold after a training step. Imported by the ranks: nothing that is slow to import here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.backends.fsdp.sharded_runs import losses, part_of
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.head_models import FsdpCritic
from miles.backends.fsdp.lora_model import LoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.lora.targets import LoraSpec
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import build_optimizer


@dataclass(frozen=True, kw_only=True)
class HeldCase:
    """A model as ``role``: policy, frozen, critic or adapters, which are ``lora``."""

    spec: DecoderSpec
    layout: ParallelDims
    dtype: str = "float32"
    moments: str = "float32"
    optimizer: str = "adam"
    role: str = "policy"
    lora: LoraSpec | None = None


def held(rank: int, world: int, cases: list[HeldCase]) -> list[tuple[int, int, int]]:
    """Bytes of weights, of gradients, and of masters and moments, in each case."""
    return [_hold(case) for case in cases]


def _hold(case: HeldCase) -> tuple[int, int, int]:
    mesh = FsdpMesh(case.layout, torch.device("cpu"))
    base = FsdpModel(case.spec, mesh, dtype=getattr(torch, case.dtype), frozen=case.role in ("frozen", "adapters"))
    with torch.no_grad():
        for parameter in base.parameters().values():
            if parameter.is_floating_point():
                parameter.normal_(0.0, 0.02)
            else:
                parameter.zero_()
    base.after_update()
    plan = part_of(mesh, case.spec)[:1]
    weights = _sum_storages(_list_local(base))
    if case.role == "frozen":
        return weights, 0, 0
    model: Any = base
    if case.role == "critic":
        model = FsdpCritic(base)
        weights += sum(p.nbytes for p in model.head_parameters.values())
    if case.lora is not None:
        model = LoraModel(base, case.lora, base=Path(), seed=1)
        weights += sum(p.nbytes for p in [*model.adapters().parameters.values(), *model._base.values()])
    train = TrainConfig(optimizer_state_dtype=case.moments, optimizer=case.optimizer)  # pyright: ignore[reportArgumentType]
    trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
    optimizer = build_optimizer(trained, train, build_lr_schedule(train, updates=1), model=model)
    if case.role == "critic":
        for rows in plan:
            model.forward_backward_values([rows], lambda _, value_R: (value_R.square().sum(), {}))
    else:
        losses(model, plan)
    model.finalize_grads()
    grads = sum(p.grad.nbytes for p in trained.values() if p.grad is not None)
    optimizer.step()
    model.after_update()
    own = {t.untyped_storage().data_ptr() for t in _list_local(base)}
    masters = [p for p in base.parameters().values() if p.untyped_storage().data_ptr() not in own]
    return weights, grads, sum(p.nbytes for p in masters) + optimizer.bytes


def _list_local(model: FsdpModel) -> list[Tensor]:
    return [p.to_local() if isinstance(p, DTensor) else p for p in model._decoder.parameters()]


def _sum_storages(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors: FSDP pads shards of rows that do not divide evenly."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}.values())
