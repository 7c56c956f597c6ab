"""Functions that test ranks run on samples with images."""

import asyncio
from pathlib import Path
from typing import Any

import torch
from tests.backends.megatron.cases import adapted, load_frozen, lora_of, read_lora, stepped, trainer_of
from tests.train.vision_samples import mixed

from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.train.dp_group import SINGLE_RANK

TOKENS = 72


def image_samples(kind: str, samples: str) -> tuple[Sample, ...]:
    """Samples, whose images no process can send to another: of several turns, of the prompts of a kind, or of text."""
    if samples != "prompts":
        return tuple(s for s in mixed(kind) if samples == "turns" or not s.images)
    from tests.models.vision.small_vision import prompts_of
    from tests.train.test_vision_training import answered

    return tuple(answered(prompts_of(kind)))


def step_alone(
    folder: Path, batch: tuple[str, str], frozen: FrozenVision = TRAINED_VISION, **train: Any
) -> dict[str, Any]:
    """A step of the embedded trainer in one process: the oracle, itself held against transformers."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    model = LocalModel(decoder, config=read_config(folder), frozen_vision=frozen)
    return stepped(model, image_samples(*batch), SINGLE_RANK, {}, max_tokens_per_gpu=TOKENS, **train)


def step_on_ranks(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[str, str],
    frozen: FrozenVision,
    out: Path | None,
    train: dict[str, Any],
) -> dict[str, Any]:
    """The same step on one of Megatron's ranks; before it the model is exported, after it a checkpoint written."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folder))
        model = load_megatron_model(folder, spec, layout, dtype=torch.float32, flags=flags, frozen_vision=frozen)
        try:
            if out is not None:
                model.save(out / "exported")
            tokens = TOKENS // layout.context  # micro-batches are those of one process
            found = stepped(model, image_samples(*batch), model.dp_group, {}, max_tokens_per_gpu=tokens, **train)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out / "checkpoint"))
            return found
        finally:
            destroy_parallel_state()


def adapt_alone(folder: Path, batch: tuple[str, str], modules: str, form: dict[str, Any]) -> dict[str, Any]:
    """A step of adapters in one process of the embedded trainer."""
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    lora = lora_of(decoder.spec, modules, **form)
    model = adapted(LocalModel(decoder, config=read_config(folder), frozen=True), folder, lora)
    return stepped(model, image_samples(*batch), SINGLE_RANK, {}, max_tokens_per_gpu=TOKENS)


def adapt_on_ranks(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[str, str],
    modules: str,
    form: dict[str, Any],
) -> dict[str, Any]:
    """The same step on one of Megatron's ranks."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        lora = read_lora(folder, modules, **form)
        base = load_frozen(folder, layout, flags, lora)
        try:
            model = adapted(base, folder, lora)
            tokens = TOKENS // layout.context  # micro-batches are those of one process
            found = stepped(model, image_samples(*batch), base.dp_group, {}, max_tokens_per_gpu=tokens)
            del found["trainer"]
            return found
        finally:
            destroy_parallel_state()


def load_and_save(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    saved: Path,
    exported: Path,
    written: Path,
) -> None:
    """Load ``saved`` into the model of ``folder``, export that, and write it in Megatron's format."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec = spec_from_config(read_config(folder))
        model = load_megatron_model(folder, spec, layout, dtype=torch.float32, flags=flags)
        try:
            model.load(saved)
            model.save(exported)
            checkpoint.save(model, written)
        finally:
            destroy_parallel_state()


def resume_on_ranks(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    kind: str,
    out: Path,
    train: dict[str, Any],
    later: dict[str, Any],
) -> tuple[dict[str, torch.Tensor], ...]:
    """The whole weights of two steps, and of the second step resumed from ``out`` with options ``later``."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        config = read_config(folder)
        batch = image_samples(kind, "turns")

        def build(options: dict[str, Any]) -> tuple[Any, Any]:
            spec = spec_from_config(config)
            model = load_megatron_model(folder, spec, layout, dtype=torch.float32, flags=flags, config=config)
            return model, trainer_of(model, {}, model.dp_group, max_tokens_per_gpu=TOKENS, **options)

        def step(model: Any, trainer: Any, number: int) -> dict[str, torch.Tensor]:
            asyncio.run(trainer.step(Batch(step=number, samples=batch, num_groups=1)))
            return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}

        try:
            model, trainer = build(train)
            step(model, trainer, 0)
            asyncio.run(trainer.save(out))
            model.barrier()
            wanted = step(model, trainer, 1)
            destroy_parallel_state()
            model, trainer = build(later)
            asyncio.run(trainer.load(out))
            return wanted, step(model, trainer, 1)
        finally:
            destroy_parallel_state()
