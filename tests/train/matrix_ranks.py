"""Models of a few matrices for Muon's tests, held whole or shared by ranks; light, as ranks import it."""

from pathlib import Path

import torch
from torch import distributed as dist

from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.model import FsdpModel
from miles.backends.fsdp.sharded import open_sharded
from miles.models import hub
from miles.models.families import spec_of
from miles.models.matrices import Matrices
from miles.train.config import TrainConfig
from miles.train.optim import Optimizer, optimizer_of, whole_norm
from miles.train.rates import schedule_of


class Model:
    """Parameters of known shapes, held whole by one rank."""

    def __init__(self, table):
        self.table = table

    def norm(self, grads):
        return whole_norm(grads)

    def gather(self, name, local):
        return local

    def cut(self, name, whole):
        return whole

    def matrices(self):
        return self.table


def one(shape):
    return Matrices(shape, ((0, shape[-2], 1),))


def config_of(**knobs):
    return TrainConfig(**({"optimizer": "muon", "lr": 1e-2, "weight_decay": 0.1, "clip_grad": 0.0} | knobs))


class Split(Model):
    """Rows, or experts of a stack, cut over the ranks of the default group, the last having fewer or none."""

    def norm(self, grads):
        total = torch.stack([g.square().sum() for g in grads.values()]).sum()
        dist.all_reduce(total)
        return total.sqrt()

    def gather(self, name, local):
        per = -(-self.table[name].shape[0] // dist.get_world_size())
        padded = local.new_zeros(per, *local.shape[1:])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, padded)
        return torch.cat(parts)[: self.table[name].shape[0]]

    def cut(self, name, whole):
        per = -(-len(whole) // dist.get_world_size())
        return whole[dist.get_rank() * per : (dist.get_rank() + 1) * per]


SHARED = {
    "fused": Matrices((20, 8), ((0, 10, 1), (10, 15, 1), (15, 20, 1))),
    "tall": one((11, 4)),
    "short": one((1, 9)),
    "experts": Matrices((4, 6, 5), ((0, 3, 1), (3, 6, 1))),
    "wide": one((6, 13)),
}


def trained(table, cut):
    torch.manual_seed(0)
    whole = {n: torch.randn(m.shape) for n, m in SHARED.items()} | {"norm": torch.randn(8)}
    config = config_of(clip_grad=1.0)
    params = {n: (cut(n, w) if n in SHARED else w).clone().requires_grad_() for n, w in whole.items()}
    optimizer = Optimizer(params, config, schedule_of(config, updates=9), norm=table.norm, model=table)
    for seed in range(3):
        torch.manual_seed(seed)
        for name, w in whole.items():
            grad = torch.randn(w.shape)
            params[name].grad = (cut(name, grad) if name in SHARED else torch.zeros_like(grad)).clone()
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


def on_a_rank(rank, world):
    split = Split(SHARED)
    found = trained(split, split.cut)
    return {n: split.gather(n, p) if n in SHARED else p for n, p in found.items()}


# -- a decoder ------------------------------------------------------------------------------


def updated(model, **knobs):
    """The whole weights after two updates along given gradients."""
    config = config_of(clip_grad=1.0, adam_eps=1e-2, **knobs)
    trained = {n: p for n, p in model.parameters().items() if p.requires_grad}
    optimizer = optimizer_of(trained, config, schedule_of(config, updates=9), model=model)
    for seed in range(2):
        torch.manual_seed(seed)
        for name, p in trained.items():
            grad = torch.randn(model.gather(name, p.detach()).shape)
            p.grad = model.cut(name, grad).clone()
        optimizer.step()
        model.updated()
    return {name: model.gather(name, p.detach()).clone() for name, p in trained.items()}


def decoder_alone(folder, **knobs):
    return updated(FsdpModel(hub.load(folder, device="cpu", dtype=torch.float32)), **knobs)


def decoder_on_a_rank(rank, world, folder, layouts, choices):
    spec, cpu = spec_of(hub.read_config(folder)), torch.device("cpu")
    return [
        updated(open_sharded(Path(folder), spec, Mesh(layout, cpu), dtype=torch.float32), **knobs)
        for layout in layouts
        for knobs in choices
    ]
