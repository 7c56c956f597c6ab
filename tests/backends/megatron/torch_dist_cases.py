"""Functions that test ranks run on Megatron's distributed checkpoints."""

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tests.backends.megatron.cases import adapted, load_frozen, read_lora, trainer_of
from tests.train.small_trainer import EPS, worker
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError
from miles.core.markers import collect_files, list_missing_ranks
from miles.core.types import Batch, Sample
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.train.policy_trainer import PolicyTrainer


def build_trainer(model: Any, dp_group: Any, **more: Any) -> PolicyTrainer:
    """A trainer that saves Megatron's distributed checkpoints."""
    how = {
        "max_tokens_per_gpu": 16,
        "adam_eps": EPS,
        "lr": 1e-2,
        "weight_decay": 0.5,
        "ckpt_format": "torch_dist",
    } | more
    return worker(model, train=how, temperature=0.9, dp_group=dp_group)


def train_and_save(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batches: tuple[tuple[Sample, ...], ...],
    out: Path,
    dtype: torch.dtype = torch.float32,
    background: bool = False,
) -> dict[str, torch.Tensor]:
    """Make a step, save it to ``out``, and make the others; returns the whole weights.

    In the ``background`` files are written when the other steps have been made.
    """
    return _train(folder, layout, flags, batches, out, dtype, resume=False, background=background)


def load_and_train(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batches: tuple[tuple[Sample, ...], ...],
    out: Path,
    dtype: torch.dtype = torch.float32,
) -> dict[str, torch.Tensor]:
    """Resume from ``out``, and make the other steps; returns the whole weights."""
    return _train(folder, layout, flags, batches, out, dtype, resume=True)


def _train(
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batches: tuple[tuple[Sample, ...], ...],
    out: Path,
    dtype: torch.dtype,
    *,
    resume: bool,
    background: bool = False,
) -> dict[str, torch.Tensor]:
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.checkpoint import InProcessSaveStrategy
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        config = read_config(folder)
        model = load_megatron_model(folder, spec_from_config(config), layout, dtype=dtype, flags=flags, config=config)
        try:
            trainer, trained = build_trainer(model, model.dp_group, async_save=background), threading.Event()
            write = InProcessSaveStrategy._write

            def write_late(self: InProcessSaveStrategy, state: dict[str, Any], home: Path) -> None:
                assert trained.wait(timeout=300)
                write(self, state, home)

            if resume:
                asyncio.run(trainer.load(out))
                assert trainer.version.number == 1
            for number, samples in enumerate(batches):
                if number == 0 and resume:
                    continue
                asyncio.run(trainer.step(Batch(step=number, samples=samples, num_groups=1)))
                if number == 0:
                    with patch.object(InProcessSaveStrategy, "_write", write_late if background else write):
                        asyncio.run(trainer.save(out))
                    if not background:
                        model.barrier()
            if background:
                assert set(list_missing_ranks(out)) == set(range(layout.world)), "a rank says that it has written"
                model.barrier()
                trained.set()
                trainer._saver.wait()
                model.barrier()
                assert not list_missing_ranks(out)
            return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
        finally:
            destroy_parallel_state()


def fail_to_write(rank: int, world: int, folder: Path, layout: ParallelDims, out: Path) -> str:
    """The error of a save in the background whose files go where a file is, as whoever waits for them reads it."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        (occupied := out.with_name("occupied")).touch()
        model = load_megatron_model(folder, spec_from_config(read_config(folder)), layout, dtype=torch.float32)
        try:
            trainer = build_trainer(model, model.dp_group, async_save=True)
            with patch.object(checkpoint, "FileSystemWriter", lambda _: FileSystemWriter(occupied / "folder")):
                asyncio.run(trainer.save(out))
                trainer._saver.wait()
            collect_files(out)
        except CheckpointError as error:
            return str(error)
        finally:
            destroy_parallel_state()
    return "nothing"


def load_elsewhere(
    rank: int, world: int, folder: Path, layout: ParallelDims, saved: Path, has_adapters: bool = False
) -> str:
    """The error of loading ``saved`` into the model of ``folder``, which may have adapters, or nothing."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state
        from miles.core.errors import MilesError

        if has_adapters:
            lora = read_lora(folder)
            base = load_frozen(folder, layout, (), lora)
            model, dp_group = adapted(base, folder, lora), base.dp_group
        else:
            model = load_megatron_model(folder, spec_from_config(read_config(folder)), layout, dtype=torch.float32)
            dp_group = model.dp_group
        try:
            asyncio.run(trainer_of(model, {}, dp_group).load(saved))
        except MilesError as error:
            return str(error)
        finally:
            destroy_parallel_state()
        return ""


def load_and_export(rank: int, world: int, folder: Path, layout: ParallelDims, saved: Path, out: Path) -> None:
    """Load the weights of ``saved`` into another model of the same sizes, and export that."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        model = load_megatron_model(folder, spec_from_config(read_config(folder)), layout, dtype=torch.float32)
        try:
            model.load(saved)
            model.save(out)
        finally:
            destroy_parallel_state()


def save_weights(rank: int, world: int, folder: Path, layout: ParallelDims, out: Path) -> None:
    """Write the weights of ``folder`` in Megatron's format."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron import checkpoint
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        model = load_megatron_model(folder, spec_from_config(read_config(folder)), layout, dtype=torch.float32)
        try:
            checkpoint.save(model, out, iteration=7)
        finally:
            destroy_parallel_state()
