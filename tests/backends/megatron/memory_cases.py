"""What Megatron's ranks hold after a training step, tensor by tensor. Imported by the ranks."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tests.backends.megatron import cases, packed_cases
from torch import Tensor

from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.checkpoint.value_head import value_head_shapes
from miles.models.families import spec_from_config
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """A model of ``cases`` as ``role``: policy, frozen, critic, or adapters of some ``modules``.

    ``packed`` is the format of a base, whose scales ``scale_ranks`` can share.
    """

    kind: str
    layout: dict[str, Any] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    dtype: str = "bfloat16"
    role: str = "policy"
    train: dict[str, Any] = field(default_factory=dict)
    modules: str | None = None
    packed: str | None = None
    scale_ranks: int = 1

    def pack(self, spec: DecoderSpec) -> DecoderSpec:
        """The spec with a packed base, if there is one."""
        if self.packed is None:
            return spec
        format = FORMATS[self.packed]
        quantization = QuantizationSpec(format=format, packed=True, tensor_parallel_size=self.scale_ranks)
        return replace(spec, quantization=quantization)

    def __hash__(self) -> int:
        return hash(str(self))

    def dims(self, world: int) -> ParallelDims:
        return ParallelDims(world=world, **self.layout)


def hold_all(rank: int, world: int, folder: Path, held: list[MemoryCase]) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer states of this rank in each case."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        return [_hold(case, folder / case.kind.replace(" ", "_"), world) for case in held]


def _hold(case: MemoryCase, folder: Path, world: int) -> tuple[int, int, int]:
    from miles.backends.megatron.model import load_megatron_model
    from miles.backends.megatron.parallel_state import destroy_parallel_state

    spec = case.pack(spec_from_config(read_config(folder)))
    how: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "flags": case.flags}
    if case.role == "critic":
        how["scalar_head"] = value_head_shapes(spec.hidden_size)
    if case.role == "adapters":
        how["lora"] = cases.lora_of(spec, case.modules)
    try:
        model = load_megatron_model(folder, spec, case.dims(world), frozen=case.role in ("frozen", "adapters"), **how)
        if case.role == "frozen":
            return _sum_weights(model)[0], 0, 0
        return _step(case, model, folder)
    finally:
        destroy_parallel_state()


def _step(case: MemoryCase, model: Any, folder: Path) -> tuple[int, int, int]:
    from tests.train.small_trainer import worker

    from miles.backends.megatron.head_models import MegatronCritic
    from miles.train.config import TrainConfig
    from miles.train.optim.lr_scheduler import build_lr_schedule
    from miles.train.optim.optimizer import build_optimizer

    batch = Batch(step=0, samples=cases.samples(case.kind, 8), num_groups=1)
    train = {"max_tokens_per_gpu": 64, **case.train}
    algo = {"use_rollout_routing_replay": True} if case.kind in cases.ROUTED else {}
    if case.role == "critic":
        value: Any = MegatronCritic(model)
        config = TrainConfig(**train)
        trained = {name: p for name, p in value.parameters().items() if p.requires_grad}
        optimizer: Any = build_optimizer(trained, config, build_lr_schedule(config, updates=1), model=value)
        for parameter in trained.values():
            if parameter.numel():
                parameter.grad = torch.zeros_like(parameter)
        grads = _sum_gradients(model, optimizer)
        optimizer.step()
        _check_masters(value, optimizer)
        weights, masters = _sum_weights(model)
        return weights, grads, masters + optimizer.bytes
    actor: Any = model
    if case.role == "adapters":
        attach = cases.adapted if case.packed is None else packed_cases.attach
        actor = attach(model, folder, cases.lora_of(model.spec, case.modules))
    trainer = worker(actor, algo=algo, train=train, temperature=0.9, dp_group=model.dp_group)
    optimizer, found = trainer._optimizer, []
    step = optimizer.step

    def watched(lr: float | None = None) -> tuple[float, float]:
        found.append(_sum_gradients(model, optimizer))
        return step(lr)

    optimizer.step = watched  # pyright: ignore[reportAttributeAccessIssue]
    asyncio.run(trainer.step(batch))
    weights, masters = _sum_weights(model)
    if case.role == "adapters":
        weights += sum(p.nbytes for p in actor.adapters().parameters.values())
        weights += _count_storages(list(actor._base.values()))
    return weights, found[-1], masters + optimizer.bytes


def _check_masters(value: Any, optimizer: Any) -> None:
    """The states are those of the parameters they are named after."""
    parameters, state = value.parameters(), dict(optimizer.state())
    for name, parameter in parameters.items():
        if f"master.{name}" in state and parameter.numel():
            assert torch.equal(state[f"master.{name}"].to(parameter.dtype), parameter.detach()), name


def _sum_gradients(model: Any, optimizer: Any) -> int:
    if model._buffers is not None:
        return sum(
            buffer.grad_data.nbytes
            for chunk in model._buffers.ddp_chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        )
    return sum(weight.grad.nbytes for weight in optimizer._params if weight.grad is not None)


def _sum_weights(model: Any) -> tuple[int, int]:
    """Bytes of the storages behind weights, and of float32 masters of weights that are not."""
    registry = model._registry
    modules = [tensor for tensors in registry._modules.values() for tensor in tensors]
    own = [parameter for name, parameter in registry.parameters.items() if name not in registry._copies]
    same = [p for p in registry._copies.values() if p.dtype == model.tf_config.params_dtype]
    masters = [p for p in registry._copies.values() if p.dtype != model.tf_config.params_dtype]
    weights = _count_storages([*modules, *own, *same])
    return weights, _count_storages(masters)


def _count_storages(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(storages.values())
