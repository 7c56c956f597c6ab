"""What ranks of a layout hold after a training step. Imported by the ranks: nothing that is slow to import here."""

from __future__ import annotations

import torch
from tests.backends.fsdp.sharded_runs import losses, part_of
from torch.distributed.tensor import DTensor

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import build_optimizer


def held(rank: int, world: int, cases: list[tuple[DecoderSpec, ParallelDims, str, str]]) -> list[tuple[int, int, int]]:
    """Bytes of parameters and masters, of gradients, and of moments, in each case."""
    found = []
    for spec, layout, dtype, moments in cases:
        mesh = FsdpMesh(layout, torch.device("cpu"))
        model = FsdpModel(spec, mesh, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters().values():
                parameter.normal_(0.0, 0.02)
        model.after_update()
        train = TrainConfig(optimizer_state_dtype=moments)  # pyright: ignore[reportArgumentType]
        optimizer = build_optimizer(model.parameters(), train, build_lr_schedule(train, updates=1), model=model)
        losses(model, part_of(mesh, spec)[:1])
        model.finalize_grads()
        grads = sum(p.grad.nbytes for p in model.parameters().values() if p.grad is not None)
        optimizer.step()
        model.after_update()
        under = [p.to_local() if isinstance(p, DTensor) else p for p in model._decoder.parameters()]
        own = {p.data_ptr() for p in under}
        leaves = sum(p.nbytes for p in model.parameters().values() if p.data_ptr() not in own)
        found.append((sum(p.nbytes for p in under) + leaves, grads, optimizer.bytes))
    return found
