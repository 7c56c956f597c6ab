"""A model in training, held by one process or by several ranks: the same loss, told by its gradient.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.fsdp.mesh import Mesh
from miles.backends.fsdp.model import FsdpModel
from miles.backends.fsdp.sharded import ShardedModel, open_sharded
from miles.backends.fsdp.sharded_value import ShardedValue
from miles.backends.fsdp.value import FsdpValue
from miles.cluster.layout import Layout
from miles.models import hub
from miles.models.decoder import Decoder
from miles.models.families import spec_of
from miles.models.recompute import Recompute
from miles.models.spec import DecoderSpec, MoeSpec
from miles.train.logits import Output, logprobs
from miles.train.peers import ALONE
from miles.train.roles import Kept, TrainModel
from miles.train.rows import Rows

CPU = torch.device("cpu")
LENGTHS = ((7, 1, 5), (9, 4), (6,), (3, 8, 2))
"""Of the samples of four micro-batches, dealt out over the parts in order."""


def decoder_of(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder no parameter of which is zero or one."""
    decoder = Decoder(spec_of(config), device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            if name.endswith(".A_log"):
                parameter.sub_(3)
    return decoder


def rows_of(spec: DecoderSpec, number: int, *, replay: bool = False) -> Rows:
    """Micro-batch ``number``: every other token is trained."""
    lengths = LENGTHS[number]
    generator = torch.Generator().manual_seed(number)
    size = sum(lengths)
    before_R = torch.arange(0, size, 2)
    count = len(before_R)
    sample_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    layers = len(spec.moe_layers)
    replay_TLk = None
    if replay and layers:
        moe = spec.layers[spec.moe_layers[0]].ffn
        assert isinstance(moe, MoeSpec)
        drawn = torch.rand(size, layers, moe.num_experts, generator=generator)
        replay_TLk = drawn.topk(moe.experts_per_token).indices
        replay_TLk[::3] = -1
    return Rows(
        lengths=lengths,
        tokens_T=torch.randint(spec.vocab_size, (size,), generator=generator),
        positions_T=torch.cat([torch.arange(n) for n in lengths]),
        before_R=before_R,
        target_R=torch.randint(spec.vocab_size, (count,), generator=generator),
        engine_logp_R=torch.zeros(count),
        advantage_R=torch.randn(count, generator=generator),
        oldest_R=torch.zeros(count, dtype=torch.int32),
        weight_R=torch.rand(count, generator=generator),
        mean_R=torch.rand(count, generator=generator),
        sample_R=sample_T[before_R],
        trained_B=torch.ones(len(lengths), dtype=torch.int64),
        replay_TLk=replay_TLk,
    )


@dataclass(frozen=True)
class Found:
    """What a rank tells: sums over the parts, whole tensors, and whether every whole came back bit for bit."""

    loss: float
    norm: float
    logps: list[np.ndarray]
    flips: list[int]
    grads: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    again: float
    exact: bool


def losses(model: TrainModel, plan: Sequence[Rows], *, backward: bool = True) -> tuple[Tensor, list[Kept]]:
    """The loss of a plan's rows, and what was kept of each."""
    total = torch.zeros((), dtype=torch.float64)

    def judge(number: int, output: Output) -> tuple[Tensor | None, Kept]:
        rows = plan[number]
        logp_R, entropy_R = logprobs(output, rows.target_R, temperature=1.3, chunk=5)
        loss = -(rows.weight_R * (rows.advantage_R * logp_R + 0.1 * entropy_R)).sum()
        nonlocal total
        total = total + loss.detach().double()
        flips = torch.zeros((), dtype=torch.int64) if output.flips is None else output.flips
        return loss if backward else None, {"logp": logp_R.detach(), "flips": flips}

    kept = model.each(plan, judge)
    return total, kept


def trained(model: TrainModel, plan: Sequence[Rows], peers: Any, exact: bool) -> Found:
    """One step of plain gradient descent, and the loss after it; looking at it first changes nothing."""
    with torch.no_grad():
        before, _ = losses(model, plan, backward=False)
    loss, kept = losses(model, plan)
    model.settle()
    grads = {name: p.grad for name, p in model.parameters().items() if p.grad is not None}
    norm = float(model.norm(grads))
    whole = {name: model.gather(name, grad).numpy().copy() for name, grad in grads.items()}
    torch.optim.SGD([p for p in model.parameters().values() if p.requires_grad], lr=0.01, foreach=False).step()
    for parameter in model.parameters().values():
        parameter.grad = None
    model.updated()
    after = {name: model.gather(name, p.detach()).float().numpy().copy() for name, p in model.parameters().items()}
    with torch.no_grad():
        again, _ = losses(model, plan, backward=False)
    return Found(
        loss=float(peers.sum(loss)),
        norm=norm,
        logps=[found["logp"].float().numpy() for found in kept],
        flips=[int(found["flips"]) for found in kept],
        grads=whole,
        after=after,
        again=float(peers.sum(again)),
        exact=exact and bool(before == loss),
    )


def one_process(decoder: Decoder, *, replay: bool = False) -> Found:
    """The oracle."""
    plan = [rows_of(decoder.spec, number, replay=replay) for number in range(len(LENGTHS))]
    return trained(FsdpModel(decoder), plan, ALONE, True)


def part_of(mesh: Mesh, spec: DecoderSpec, *, replay: bool = False) -> list[Rows]:
    """The rows that are this rank's: micro-batches in turn."""
    return [rows_of(spec, n, replay=replay) for n in range(mesh.peers.part, len(LENGTHS), mesh.peers.parts)]


def exact(model: ShardedModel, whole: Mapping[str, Tensor]) -> bool:
    """Does every parameter lie where it should, and come back to the last bit?"""
    good = True
    for name, local in model.parameters().items():
        tensor = whole[name].detach().to(local.dtype)
        cut = model.cut(name, tensor)
        good &= torch.equal(cut, local.detach()) and torch.equal(model.gather(name, cut), tensor)
    return good


def ranked(
    rank: int,
    world: int,
    folder: str,
    layouts: Sequence[Layout],
    dtype: str = "float32",
    recompute: Recompute = "none",
    replay: bool = False,
    staged: bool = False,
) -> list[Found | None]:
    """The same over ranks, for each layout; only the first rank tells all."""
    torch.manual_seed(rank)
    config = hub.read_config(folder)
    whole = dict(hub.load(folder, device="cpu", dtype=torch.float32).named_parameters())
    found: list[Found | None] = []
    for layout in layouts:
        mesh = Mesh(layout, CPU)
        mesh.staged |= staged
        spec = spec_of(config)
        model = open_sharded(Path(folder), spec, mesh, dtype=getattr(torch, dtype), recompute=recompute)
        told = trained(model, part_of(mesh, spec, replay=replay), mesh.peers, exact(model, whole))
        found.append(told if rank == 0 else None)
    return found


# -- the critic -------------------------------------------------------------------------------


def judged(model: FsdpValue | ShardedValue, plan: Sequence[Rows]) -> dict[str, np.ndarray]:
    """The gradient of a sum over what is expected, whole, with its norm; the head is not zero."""
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if name.startswith("value_head."):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    for rows in plan:
        values_R = model.values(rows.tokens_T, rows.positions_T, rows.lengths, rows.before_R)
        (rows.weight_R * values_R.square()).sum().backward()
    model.settle()
    grads = {name: p.grad for name, p in model.parameters().items() if p.grad is not None}
    found = {name: model.gather(name, grad).numpy().copy() for name, grad in grads.items()}
    return {"norm": model.norm(grads).numpy(), **found}


def one_critic(decoder: Decoder) -> dict[str, np.ndarray]:
    return judged(FsdpValue(decoder), [rows_of(decoder.spec, number) for number in range(len(LENGTHS))])


def critics(rank: int, world: int, folder: str, layouts: Sequence[Layout]) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = []
    for layout in layouts:
        mesh = Mesh(layout, CPU)
        spec = spec_of(hub.read_config(folder))
        model = ShardedValue(open_sharded(Path(folder), spec, mesh, dtype=torch.float32))
        found.append(judged(model, part_of(mesh, spec)))
    return found


# -- what lies where --------------------------------------------------------------------------


def moved(rank: int, world: int, folder: str, out: str) -> dict[str, bool]:
    """What a model does beside learning, cut in every way at once."""
    mesh, path = Mesh(Layout(world=world, tensor=2, shard=world // 2), CPU), Path(folder)
    spec = spec_of(hub.read_config(folder))
    model = open_sharded(path, spec, mesh, dtype=torch.bfloat16, like=path)
    before = dict(model.parameters())
    places = {name: p.untyped_storage().data_ptr() for name, p in before.items() if p.numel()}
    plan = part_of(mesh, spec)
    first, _ = losses(model, plan)
    model.settle()
    model.move(CPU)
    with torch.no_grad():
        again, _ = losses(model, plan, backward=False)
        for parameter in model.parameters().values():
            parameter.mul_(2)
        model.updated()
        other, _ = losses(model, plan, backward=False)
    model.load(path)
    model.save(Path(out))
    frozen = open_sharded(path, spec, mesh, dtype=torch.bfloat16, frozen=True)
    hosted = open_sharded(path, spec, mesh, dtype=torch.bfloat16, cpu_offload=True)
    with torch.no_grad():
        cold, _ = losses(frozen, plan, backward=False)
    warm, _ = losses(hosted, plan)
    after = model.parameters()
    return {
        "float32 masters": all(p.dtype == torch.float32 for p in before.values()),
        "gradients beside them": all(p.grad is not None and p.grad.shape == p.shape for p in before.values()),
        "the same objects": all(after[name] is p for name, p in before.items()),
        "in the same places": all(before[n].untyped_storage().data_ptr() == place for n, place in places.items()),
        "the same after a sleep": bool(first == again),
        "another after an update": bool(first != other),
        "frozen alike": bool(first == cold),
        "frozen in its own dtype": all(p.dtype == torch.bfloat16 for p in frozen.parameters().values()),
        "frozen without gradients": not any(p.requires_grad for p in frozen.parameters().values()),
        "on the host alike": bool(first == warm),
    }
