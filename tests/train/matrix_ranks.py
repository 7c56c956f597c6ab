"""Models of a few matrices for Muon's tests, held whole or shared by ranks; light, as ranks import it."""

from pathlib import Path

import torch
from tests.backends.fsdp.load import load_fsdp_model
from torch import distributed as dist

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.local_model import LocalModel
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.optim_groups import MuonMatrices
from miles.train.config import TrainConfig
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer, build_optimizer, full_grad_norm


class Model:
    """Parameters of known shapes, held whole by one rank."""

    def __init__(self, table):
        self.table = table

    def norm(self, grads):
        return full_grad_norm(grads)

    def gather(self, name, local):
        return local

    def shard(self, name, full):
        return full

    def muon_matrices(self):
        return self.table


def one(shape):
    return MuonMatrices(shape, ((0, shape[-2], 1),))


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

    def shard(self, name, full):
        per = -(-len(full) // dist.get_world_size())
        return full[dist.get_rank() * per : (dist.get_rank() + 1) * per]


SHARED = {
    "fused": MuonMatrices((20, 8), ((0, 10, 1), (10, 15, 1), (15, 20, 1))),
    "tall": one((11, 4)),
    "short": one((1, 9)),
    "experts": MuonMatrices((4, 6, 5), ((0, 3, 1), (3, 6, 1))),
    "wide": one((6, 13)),
}


def trained(table, cut):
    torch.manual_seed(0)
    whole = {n: torch.randn(m.shape) for n, m in SHARED.items()} | {"norm": torch.randn(8)}
    config = config_of(clip_grad=1.0)
    params = {n: (cut(n, w) if n in SHARED else w).clone().requires_grad_() for n, w in whole.items()}
    optimizer = Optimizer(params, config, build_lr_schedule(config, updates=9), norm=table.norm, model=table)
    for seed in range(3):
        torch.manual_seed(seed)
        for name, w in whole.items():
            grad = torch.randn(w.shape)
            params[name].grad = (cut(name, grad) if name in SHARED else torch.zeros_like(grad)).clone()
        optimizer.step()
    return {n: p.detach() for n, p in params.items()}


def on_a_rank(rank, world):
    split = Split(SHARED)
    found = trained(split, split.shard)
    return {n: split.gather(n, p) if n in SHARED else p for n, p in found.items()}


# -- a decoder ------------------------------------------------------------------------------


def updated(model, **knobs):
    """The whole weights after two updates along given gradients."""
    config = config_of(clip_grad=1.0, adam_eps=1e-2, **knobs)
    trained = {n: p for n, p in model.parameters().items() if p.requires_grad}
    optimizer = build_optimizer(trained, config, build_lr_schedule(config, updates=9), model=model)
    for seed in range(2):
        torch.manual_seed(seed)
        for name, p in trained.items():
            grad = torch.randn(model.gather(name, p.detach()).shape)
            p.grad = model.shard(name, grad).clone()
        optimizer.step()
        model.after_update()
    return {name: model.gather(name, p.detach()).clone() for name, p in trained.items()}


def decoder_alone(folder, **knobs):
    return updated(LocalModel(hf.load(folder, device="cpu", dtype=torch.float32)), **knobs)


def decoder_on_a_rank(rank, world, folder, layouts, choices):
    spec, cpu = spec_from_config(hf.read_config(folder)), torch.device("cpu")
    return [
        updated(load_fsdp_model(Path(folder), spec, FsdpMesh(layout, cpu), dtype=torch.float32), **knobs)
        for layout in layouts
        for knobs in choices
    ]
