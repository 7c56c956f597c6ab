"""What ranks of a layout hold after a training step. Imported by the ranks: nothing that is slow to import here."""

from __future__ import annotations

import torch
from tests.backends.fsdp.parted import losses, part_of
from torch.distributed.tensor import DTensor

from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.sharded import ShardedModel
from miles.cluster.layout import Layout
from miles.models.spec import DecoderSpec
from miles.train.config import TrainConfig
from miles.train.optim import optimizer_of
from miles.train.rates import schedule_of


def held(rank: int, world: int, cases: list[tuple[DecoderSpec, Layout, str, str]]) -> list[tuple[int, int, int]]:
    """Bytes of parameters and masters, of gradients, and of moments, in each case."""
    found = []
    for spec, layout, dtype, moments in cases:
        mesh = Mesh(layout, torch.device("cpu"))
        model = ShardedModel(spec, mesh, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for parameter in model.parameters().values():
                parameter.normal_(0.0, 0.02)
        model.updated()
        train = TrainConfig(optimizer_state_dtype=moments)  # pyright: ignore[reportArgumentType]
        optimizer = optimizer_of(model.parameters(), train, schedule_of(train, updates=1), model=model)
        losses(model, part_of(mesh, spec)[:1])
        model.settle()
        grads = sum(p.grad.nbytes for p in model.parameters().values() if p.grad is not None)
        optimizer.step()
        model.updated()
        under = [p.to_local() if isinstance(p, DTensor) else p for p in model._decoder.parameters()]
        own = {p.data_ptr() for p in under}
        leaves = sum(p.nbytes for p in model.parameters().values() if p.data_ptr() not in own)
        found.append((sum(p.nbytes for p in under) + leaves, grads, optimizer.bytes))
    return found
