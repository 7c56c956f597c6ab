"""Functions that one rank runs in the tests of Megatron's distributed optimizer."""

import asyncio
import multiprocessing.process
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.megatron.cases import (
    ROUTED,
    adapted,
    load_frozen,
    read_lora,
    samples,
    stepped,
    trainer_of,
    written,
)

from miles.backends.fsdp.lora_model import LoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.train.optim.optimizer import GradientError
from miles.train.policy_trainer import PolicyTrainer


def carried(
    rank: int,
    world: int,
    kind: str,
    made: tuple[ParallelDims, tuple[str, ...]],
    read: tuple[ParallelDims, tuple[str, ...]],
    out: Path,
    how: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights of two steps in one layout, and of the second in another that took over what the first left."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        folder, other = out / "model", written(out / f"other{rank}", kind, seed=1)
        spec = spec_from_config(read_config(folder))
        algo = {"use_rollout_routing_replay": True} if kind in ROUTED else {}

        def second(model: Any, trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
            asyncio.run(trainer.step(Batch(step=1, samples=samples(kind, 4), num_groups=1)))
            return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}

        try:
            model = load_megatron_model(folder, spec, made[0], dtype=dtype, flags=made[1])
            trainer = stepped(model, samples(kind), model.dp_group, algo)["trainer"]
            if how == "megatron":
                checkpoint.save(model, out / "dist", trainer._optimizer)
            else:
                asyncio.run(trainer.save(out / "checkpoint"))
            version, wanted = trainer.version, second(model, trainer)
            destroy_parallel_state()
            model = load_megatron_model(other, spec, read[0], dtype=dtype, flags=read[1])
            heir = trainer_of(model, algo, model.dp_group)
            if how == "megatron":
                checkpoint.load(model, out / "dist", heir._optimizer)
                heir.version = version
            else:
                asyncio.run(heir.load(out / "checkpoint"))
            assert heir._optimizer.updates == 1
            if model._buffers is not None:  # all that shares memory with the weights must follow them
                discard_grad_accumulators(model._buffers)
                model._buffers.relocate(torch.clone)
                model._buffers.restore_grad_hooks()
            return wanted, second(model, heir)
        finally:
            destroy_parallel_state()


def discard_grad_accumulators(buffers: Any) -> None:
    """Set each weight to a tensor of another dtype and back: as with one of another device, its node is gone."""
    for chunk in buffers.ddp_chunks:
        for parameter in chunk.module.parameters():
            data = parameter.data
            parameter.data = data.double()
            parameter.data = data


def carry_adapters(
    rank: int,
    world: int,
    folder: Path,
    made: tuple[ParallelDims, tuple[str, ...]],
    read: tuple[ParallelDims, tuple[str, ...]],
    out: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """The adapters of two steps in one layout, and of the second in another that took over what the first left; and
    the bytes of moments of the first.
    """
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        lora = read_lora(folder)

        def second(model: LoraModel, trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
            asyncio.run(trainer.step(Batch(step=1, samples=samples("qwen3", 4), num_groups=1)))
            return {name: p.detach().clone() for name, p in model.adapters().parameters.items()}

        try:
            base = load_frozen(folder, made[0], made[1], lora)
            model = adapted(base, folder, lora)
            trainer = stepped(model, samples("qwen3"), base.dp_group, {})["trainer"]
            asyncio.run(trainer.save(out / "checkpoint"))
            size, wanted = trainer._optimizer.bytes, second(model, trainer)
            destroy_parallel_state()
            base = load_frozen(folder, read[0], read[1], lora)
            heir = LoraModel(base, lora, base=folder, seed=3)
            trainer = trainer_of(heir, {}, base.dp_group)
            asyncio.run(trainer.load(out / "checkpoint"))
            assert trainer._optimizer.updates == 1
            # As if they had been moved to the host and back.
            for parameter in heir.adapters().parameters.values():
                parameter.data = parameter.data.clone()
            return wanted, second(heir, trainer), size
        finally:
            destroy_parallel_state()


def spoiled(
    rank: int, world: int, folder: Path, layout: ParallelDims, flags: tuple[str, ...], name: str
) -> tuple[str, bool]:
    """What is said of a gradient that is no number on one rank, and whether the weights are as before."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        model = load_megatron_model(
            folder, spec_from_config(read_config(folder)), layout, dtype=torch.float32, flags=flags
        )
        try:
            trainer = trainer_of(model, {}, model.dp_group)
            before = {n: p.detach().clone() for n, p in model.parameters().items()}
            buffers: Any = model._buffers
            if name in buffers.grads():
                buffers.grads()[name].view(-1)[-1] = float("nan")
            model.finalize_grads()
            with pytest.raises(GradientError) as raised:
                trainer._optimizer.step()
            same = all(torch.equal(p, before[n]) for n, p in model.parameters().items())
            return str(raised.value), same and not any(bool(g.any()) for g in buffers.grads().values())
        finally:
            destroy_parallel_state()
