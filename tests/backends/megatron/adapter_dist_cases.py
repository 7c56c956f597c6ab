"""Functions that test ranks run on Megatron's distributed checkpoints of models with adapters."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from tests.backends.megatron.cases import adapted, load_frozen, samples
from tests.backends.megatron.family_cases import family_samples
from tests.backends.megatron.torch_dist_cases import build_trainer
from tests.backends.megatron.vision_cases import TOKENS, image_samples

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError
from miles.core.types import Batch, Sample
from miles.models.lora.targets import LoraSpec
from miles.train.checkpoint import checkpoint

IMAGE_KINDS = ("qwen2_5_vl",)
FAMILIES = ("gpt-oss", "gemma3n")


def train_adapters_and_save(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    lora: LoraSpec,
    kind: str,
    out: Path,
    hf: Path | None = None,
    background: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Make a step, save it to ``out``, and to ``hf`` as a Hugging Face model, and make the others; returns all
    parameters, whole.
    """

    def run(model: Any, trainer: Any) -> dict[str, torch.Tensor]:
        asyncio.run(trainer.step(Batch(step=0, samples=batches_of(kind)[0], num_groups=1)))
        asyncio.run(trainer.save(out))
        trainer._saver.wait()
        if hf is not None:
            checkpoint.save(hf, model, trainer._optimizer, trainer.version, model.base_model.dp_group)
        return finish(model, trainer, kind)

    return with_trainer(folder, layout, lora, run, dtype=dtype, **train_options(kind, layout), async_save=background)


def load_adapters_and_train(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    lora: LoraSpec,
    kind: str,
    out: Path,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Resume from ``out``, and make the other steps; returns all parameters, whole."""

    def run(model: Any, trainer: Any) -> dict[str, torch.Tensor]:
        asyncio.run(trainer.load(out))
        assert trainer.version.number == 1
        return finish(model, trainer, kind)

    return with_trainer(folder, layout, lora, run, dtype=dtype, **train_options(kind, layout))


def load_adapters_elsewhere(
    rank: int, world: int, folder: Path, layout: ParallelDims, lora: LoraSpec, saved: Path
) -> str:
    """The error of loading ``saved`` over the base of ``folder``, as this rank has it."""

    def run(model: Any, trainer: Any) -> str:
        try:
            asyncio.run(trainer.load(saved))
        except CheckpointError as error:
            return str(error)
        return ""

    return with_trainer(folder, layout, lora, run)


def batches_of(kind: str) -> tuple[tuple[Sample, ...], ...]:
    """The batches of two steps; no process can send images to another."""
    if kind in IMAGE_KINDS:
        return image_samples(kind, "turns"), image_samples(kind, "turns")[:2]
    make = family_samples if kind in FAMILIES else samples
    return make(kind), make(kind, 4)


def train_options(kind: str, layout: ParallelDims) -> dict[str, Any]:
    """Options of the trainer, whose micro-batches are those of one process."""
    return {"max_tokens_per_gpu": TOKENS // layout.context} if kind in IMAGE_KINDS else {}


def finish(model: Any, trainer: Any, kind: str) -> dict[str, torch.Tensor]:
    """Make the other steps."""
    for number, batch in enumerate(batches_of(kind)[1:], 1):
        asyncio.run(trainer.step(Batch(step=number, samples=batch, num_groups=1)))
    return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}


def with_trainer(
    folder: Path, layout: ParallelDims, lora: LoraSpec, run: Any, *, dtype: torch.dtype = torch.float32, **more: Any
) -> Any:
    """Run something with a model and a trainer of adapters on this rank."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        base = load_frozen(folder, layout, (), lora, dtype)
        try:
            model = adapted(base, folder, lora)
            found = run(model, build_trainer(model, base.dp_group, **more))
            base.barrier()
            return found
        finally:
            destroy_parallel_state()
