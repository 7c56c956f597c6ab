"""What one Megatron rank with batch-invariant layers computes for an engine's tokens."""

import asyncio
import multiprocessing.process
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.backends.megatron import cases
from tests.models.parallel.split_scans import splitting_all
from tests.train.small_trainer import worker

from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.kernels.numerics import BATCH_INVARIANT, Numerics
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config

TRAIN = {"max_tokens_per_gpu": 70, "lr": 1e-2, "adam_eps": 1e-4, "weight_decay": 0.1}


def step_of(model: Any, samples: Sequence[Sample], dp_group: Any, algo: dict[str, Any], temperature: float) -> Any:
    """A GRPO step of a model: its metrics, every gradient, and the weights it left, as the engine gets them."""
    trainer = worker(model, algo=algo, train=TRAIN, temperature=temperature, dp_group=dp_group)
    grads = cases.watch(model, trainer)
    report = asyncio.run(trainer.step(Batch(step=0, samples=tuple(samples), num_groups=1)))
    after = {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
    return {"metrics": dict(report.metrics), "grads": grads, "after": after}


def hand_over(
    rank: int,
    world: int,
    folder: Path,
    other: Path,
    layout: ParallelDims,
    numerics: tuple[Numerics, Numerics],
    out: Path,
) -> None:
    """Weights that a model of the first numerics writes in Megatron's own format, read by one of the second."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        # Megatron writes with processes of its own, which a rank of the pool must be allowed to have.
        multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        spec = spec_from_config(read_config(folder))
        writes, reads = numerics
        try:
            model = load_megatron_model(folder, spec, layout, dtype=torch.float32, numerics=writes)
            checkpoint.save(model, out / "dist")
            destroy_parallel_state()
            model = load_megatron_model(other, spec, layout, dtype=torch.float32, numerics=reads)
            checkpoint.load(model, out / "dist")
            model.save(out / "exported")
        finally:
            destroy_parallel_state()


def exact_step_splitting(rank: int, world: int, *args: Any) -> dict[str, Any]:
    """``exact_step`` where recurrent layers pass states on, of sequences of any length."""
    with splitting_all():
        return exact_step(rank, world, *args)


def exact_step(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    samples: Sequence[Sample],
    algo: dict[str, Any],
    dtype: torch.dtype,
    temperature: float,
    numerics: Numerics = BATCH_INVARIANT,
) -> dict[str, Any]:
    """``step_of`` one of Megatron's ranks, which have the model of ``folder``."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folder))
        model = load_megatron_model(folder, spec, layout, dtype=dtype, flags=flags, numerics=numerics)
        try:
            return step_of(model, samples, model.dp_group, algo, temperature)
        finally:
            destroy_parallel_state()
