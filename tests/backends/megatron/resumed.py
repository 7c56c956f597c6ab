"""What one rank does for the tests of Megatron's distributed optimizer."""

import asyncio
import multiprocessing.process
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.megatron.cases import ROUTED, samples, stepped, trainer_of, written

from miles.cluster.layout import Layout
from miles.core.types import Batch
from miles.models.families import spec_of
from miles.models.files import read_config
from miles.train.optim import GradientError
from miles.train.worker import Worker


def carried(
    rank: int,
    world: int,
    kind: str,
    made: tuple[Layout, tuple[str, ...]],
    read: tuple[Layout, tuple[str, ...]],
    out: Path,
    how: str,
    dtype: torch.dtype = torch.float32,
) -> tuple[dict[str, torch.Tensor], ...]:
    """The weights of two steps in one layout, and of the second in another that took over what the first left."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.layout import leave
        from miles.backends.megatron.model import open_megatron

        multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        folder, other = out / "model", written(out / f"other{rank}", kind, seed=1)
        spec = spec_of(read_config(folder))
        algo = {"use_rollout_routing_replay": True} if kind in ROUTED else {}

        def second(model: Any, trainer: Worker) -> dict[str, torch.Tensor]:
            asyncio.run(trainer.step(Batch(step=1, samples=samples(kind, 4), num_groups=1)))
            return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}

        try:
            model = open_megatron(folder, spec, made[0], dtype=dtype, flags=made[1])
            trainer = stepped(model, samples(kind), model.peers, algo)["trainer"]
            if how == "megatron":
                checkpoint.save(model, out / "dist", trainer._optimizer)
            else:
                asyncio.run(trainer.save(out / "checkpoint"))
            version, wanted = trainer.version, second(model, trainer)
            leave()
            model = open_megatron(other, spec, read[0], dtype=dtype, flags=read[1])
            heir = trainer_of(model, algo, model.peers)
            if how == "megatron":
                checkpoint.load(model, out / "dist", heir._optimizer)
                heir.version = version
            else:
                asyncio.run(heir.load(out / "checkpoint"))
            assert heir._optimizer.updates == 1
            if model._buffers is not None:  # all that shares memory with the weights must follow them
                model._buffers.relocate(torch.clone)
            return wanted, second(model, heir)
        finally:
            leave()


def spoiled(rank: int, world: int, folder: Path, layout: Layout, flags: tuple[str, ...], name: str) -> tuple[str, bool]:
    """What is said of a gradient that is no number on one rank, and whether the weights are as before."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.layout import leave
        from miles.backends.megatron.model import open_megatron

        model = open_megatron(folder, spec_of(read_config(folder)), layout, dtype=torch.float32, flags=flags)
        try:
            trainer = trainer_of(model, {}, model.peers)
            before = {n: p.detach().clone() for n, p in model.parameters().items()}
            buffers: Any = model._buffers
            if name in buffers.grads():
                buffers.grads()[name].view(-1)[-1] = float("nan")
            model.settle()
            with pytest.raises(GradientError) as told:
                trainer._optimizer.step()
            same = all(torch.equal(p, before[n]) for n, p in model.parameters().items())
            return str(told.value), same and not any(bool(g.any()) for g in buffers.grads().values())
        finally:
            leave()
