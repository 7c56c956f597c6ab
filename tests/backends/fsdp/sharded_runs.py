"""A model in training, in one process or sharded over ranks: the same loss and gradients.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model
from torch import Tensor

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.head_models import FsdpCritic
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.activation_checkpointing import RecomputeMode
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec, MoeSpec
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK
from miles.train.logprobs import HeadOutput, compute_logprobs
from miles.train.model_protocols import KeptTensors, TrainModel, ValueModel

CPU = torch.device("cpu")
LENGTHS = ((7, 1, 5), (9, 4), (6,), (3, 8, 2))
"""The samples of four micro-batches, distributed over data-parallel ranks in order."""


def decoder_of(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder no parameter of which is zero or one."""
    decoder = Decoder(spec_from_config(config), device="cpu", dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if ".ngram." in name and not parameter.is_floating_point():  # the constants of a hash
                owner, _, constant = name.rpartition(".")
                parameter.copy_(decoder.get_submodule(owner).constants()[constant])
                continue
            if not parameter.is_floating_point():  # the experts of each token
                parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape) % decoder.spec.moe.num_experts)
                continue
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            if name.endswith(".A_log"):
                parameter.sub_(3)
    return decoder


def rows_of(spec: DecoderSpec, number: int, *, replay: bool = False) -> MicroBatch:
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
    return MicroBatch(
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


def losses(model: TrainModel, plan: Sequence[MicroBatch], *, backward: bool = True) -> tuple[Tensor, list[KeptTensors]]:
    """The loss of a plan's rows, and what was kept of each."""
    total = torch.zeros((), dtype=torch.float64)

    def judge(number: int, output: HeadOutput) -> tuple[Tensor | None, KeptTensors]:
        rows = plan[number]
        logp_R, entropy_R = compute_logprobs(output, rows.target_R, temperature=1.3, chunk=5)
        loss = -(rows.weight_R * (rows.advantage_R * logp_R + 0.1 * entropy_R)).sum()
        nonlocal total
        total = total + loss.detach().double()
        flips = torch.zeros((), dtype=torch.int64) if output.flips is None else output.flips
        return loss if backward else None, {"logp": logp_R.detach(), "flips": flips}

    kept = model.forward_backward(plan, judge)
    return total, kept


def trained(model: TrainModel, plan: Sequence[MicroBatch], dp_group: Any, exact: bool) -> Found:
    """One step of plain gradient descent, and the loss after it; looking at it first changes nothing."""
    with torch.no_grad():
        before, _ = losses(model, plan, backward=False)
    loss, kept = losses(model, plan)
    model.finalize_grads()
    grads = {name: p.grad for name, p in model.parameters().items() if p.grad is not None}
    norm = float(model.norm(grads))
    whole = {name: model.gather(name, grad).numpy().copy() for name, grad in grads.items()}
    torch.optim.SGD([p for p in model.parameters().values() if p.requires_grad], lr=0.01, foreach=False).step()
    for parameter in model.parameters().values():
        parameter.grad = None
    model.after_update()
    after = {name: model.gather(name, p.detach()).float().numpy().copy() for name, p in model.parameters().items()}
    with torch.no_grad():
        again, _ = losses(model, plan, backward=False)
    return Found(
        loss=float(dp_group.sum(loss)),
        norm=norm,
        logps=[found["logp"].float().numpy() for found in kept],
        flips=[int(found["flips"]) for found in kept],
        grads=whole,
        after=after,
        again=float(dp_group.sum(again)),
        exact=exact and bool(before == loss),
    )


def one_process(decoder: Decoder, *, replay: bool = False) -> Found:
    """The oracle."""
    plan = [rows_of(decoder.spec, number, replay=replay) for number in range(len(LENGTHS))]
    return trained(LocalModel(decoder), plan, SINGLE_RANK, True)


def part_of(mesh: FsdpMesh, spec: DecoderSpec, *, replay: bool = False) -> list[MicroBatch]:
    """The rows that are this rank's: micro-batches in turn."""
    return [rows_of(spec, n, replay=replay) for n in range(mesh.dp_group.dp_rank, len(LENGTHS), mesh.dp_group.dp_size)]


def exact(model: FsdpModel, whole: Mapping[str, Tensor]) -> bool:
    """Does every parameter lie where it should, and come back to the last bit?"""
    good = True
    for name, local in model.parameters().items():
        tensor = whole[name].detach().to(local.dtype)
        cut = model.shard(name, tensor)
        good &= torch.equal(cut, local.detach()) and torch.equal(model.gather(name, cut), tensor)
    return good


def ranked(
    rank: int,
    world: int,
    folder: str,
    layouts: Sequence[ParallelDims],
    dtype: str = "float32",
    recompute: RecomputeMode = "none",
    replay: bool = False,
    staged: bool = False,
) -> list[Found | None]:
    """The same over ranks, for each layout; only the first rank tells all."""
    torch.manual_seed(rank)
    config = hf.read_config(folder)
    whole = dict(hf.load(folder, device="cpu", dtype=torch.float32).named_parameters())
    found: list[Found | None] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        mesh.staged |= staged
        spec = spec_from_config(config)
        model = load_fsdp_model(Path(folder), spec, mesh, dtype=getattr(torch, dtype), recompute=recompute)
        reported = trained(model, part_of(mesh, spec, replay=replay), mesh.dp_group, exact(model, whole))
        found.append(reported if rank == 0 else None)
    return found


# -- the critic -------------------------------------------------------------------------------


def judged(model: ValueModel, plan: Sequence[MicroBatch]) -> dict[str, np.ndarray]:
    """The gradient of a sum over what is expected, whole, with its norm; the head is not zero."""
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if name.startswith("value_head."):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    model.forward_backward_values(plan, lambda i, value_R: ((plan[i].weight_R * value_R.square()).sum(), {}))
    model.finalize_grads()
    grads = {name: p.grad for name, p in model.parameters().items() if p.grad is not None}
    found = {name: model.gather(name, grad).numpy().copy() for name, grad in grads.items()}
    return {"norm": model.norm(grads).numpy(), **found}


def one_critic(decoder: Decoder) -> dict[str, np.ndarray]:
    return judged(LocalCritic(decoder), [rows_of(decoder.spec, number) for number in range(len(LENGTHS))])


def critics(rank: int, world: int, folder: str, layouts: Sequence[ParallelDims]) -> list[dict[str, np.ndarray]]:
    found: list[dict[str, np.ndarray]] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        spec = spec_from_config(hf.read_config(folder))
        model = FsdpCritic(load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32))
        found.append(judged(model, part_of(mesh, spec)))
    return found


# -- what lies where --------------------------------------------------------------------------


def moved(rank: int, world: int, folder: str, out: str) -> dict[str, bool]:
    """What a model does beside learning, cut in every way at once."""
    mesh, path = FsdpMesh(ParallelDims(world=world, tensor=2, shard=world // 2), CPU), Path(folder)
    spec = spec_from_config(hf.read_config(folder))
    model = load_fsdp_model(path, spec, mesh, dtype=torch.bfloat16, like=path)
    before = dict(model.parameters())
    pointers = {name: p.untyped_storage().data_ptr() for name, p in before.items() if p.numel()}
    plan = part_of(mesh, spec)
    first, _ = losses(model, plan)
    model.finalize_grads()
    model.move(CPU)
    with torch.no_grad():
        again, _ = losses(model, plan, backward=False)
        for parameter in model.parameters().values():
            parameter.mul_(2)
        model.after_update()
        other, _ = losses(model, plan, backward=False)
    model.load(path)
    model.save(Path(out))
    frozen = load_fsdp_model(path, spec, mesh, dtype=torch.bfloat16, frozen=True)
    hosted = load_fsdp_model(path, spec, mesh, dtype=torch.bfloat16, cpu_offload=True)
    with torch.no_grad():
        cold, _ = losses(frozen, plan, backward=False)
    warm, _ = losses(hosted, plan)
    after = model.parameters()
    return {
        "float32 masters": all(p.dtype == torch.float32 for p in before.values()),
        "gradients beside them": all(p.grad is not None and p.grad.shape == p.shape for p in before.values()),
        "the same objects": all(after[name] is p for name, p in before.items()),
        "in the same pointers": all(before[n].untyped_storage().data_ptr() == place for n, place in pointers.items()),
        "the same after a sleep": bool(first == again),
        "another after an update": bool(first != other),
        "frozen alike": bool(first == cold),
        "frozen in its own dtype": all(p.dtype == torch.bfloat16 for p in frozen.parameters().values()),
        "frozen without gradients": not any(p.requires_grad for p in frozen.parameters().values()),
        "on the host alike": bool(first == warm),
    }
