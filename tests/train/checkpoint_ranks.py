"""A model and its optimizer that are loaded and saved again, by one process or by several ranks.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.backends.fsdp.load import load_fsdp_model
from torch import Tensor

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError
from miles.core.types import Version
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.checkpoint import checkpoint
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK
from miles.train.model_protocols import ShardedParameters
from miles.train.optim.lr_scheduler import build_lr_schedule
from miles.train.optim.optimizer import Optimizer

VERSION = Version(number=7)


def optimizer_for(model: ShardedParameters, **knobs: Any) -> Optimizer:
    config = TrainConfig(lr=1e-2, clip_grad=0.0, **knobs)
    trained = {name: p for name, p in model.parameters().items() if p.requires_grad}
    return Optimizer(trained, config, build_lr_schedule(config, updates=9), norm=model.norm)


def stepped(model: ShardedParameters, optimizer: Any, seed: int = 0) -> None:
    """An update by a gradient that every layout has the same of."""
    for number, (name, p) in enumerate(model.parameters().items()):
        if p.requires_grad:
            shape = model.gather(name, p.detach()).shape
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed + number)).to(p.dtype)
            part = model.shard(name, whole)
            (p * part).sum().backward()
    model.finalize_grads()
    optimizer.step()
    model.after_update()


def alone(
    config: Mapping[str, Any],
    dtype: torch.dtype,
    like: Path | None = None,
    seed: int = 0,
    save_dtype: torch.dtype | None = None,
) -> LocalModel:
    decoder = hf.init_random(spec_from_config(config), seed=seed, device="cpu", dtype=dtype)
    return LocalModel(decoder, config=config, like=like, save_dtype=save_dtype)


def on_disk(folder: Path, stem: str) -> dict[str, Tensor]:
    """Every tensor of the files that are called ``stem``, by its name."""
    found = [pair for path in sorted(folder.glob(f"{stem}*.safetensors")) for pair in load_file(path).items()]
    assert len(found) == len(dict(found)), "a tensor was written twice"
    return dict(found)


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    assert some.keys() == others.keys()
    for name, value in some.items():
        assert value.dtype == others[name].dtype and torch.equal(value, others[name]), name


# -- what the ranks do ------------------------------------------------------------------------


def passed_on(
    rank: int,
    world: int,
    layouts: list[ParallelDims],
    folders: list[str],
    config: Any,
    dtype: Any,
    save_dtype: Any = None,
) -> list[Any]:
    """Load the first folder in the first layout, save the next folder, load that in the next layout, and so on."""
    reported = []
    for layout, (start, end) in zip(layouts, pairwise(folders), strict=True):
        mesh = FsdpMesh(layout, torch.device("cpu"))
        spec, like = spec_from_config(config), Path(start)
        model = load_fsdp_model(like, spec, mesh, dtype=dtype, config=config, like=like, save_dtype=save_dtype)
        optimizer = optimizer_for(model)
        version = checkpoint.load(Path(start), model, optimizer, mesh.dp_group)
        Path(end).mkdir(exist_ok=True)
        checkpoint.save(Path(end), model, optimizer, version, mesh.dp_group)
        reported.append((version, optimizer.updates))
    return reported


def limited(rank: int, world: int, layout: ParallelDims, start: str, folders: list[str], config: Any) -> list[str]:
    """Save where the last rank may write no large file, then, in the background and not, where it may."""
    mesh = FsdpMesh(layout, torch.device("cpu"))
    model = load_fsdp_model(Path(start), spec_from_config(config), mesh, dtype=torch.float32, config=config)
    optimizer = optimizer_for(model)
    stepped(model, optimizer)
    reported = []
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number, folder in enumerate(folders):
        saving = checkpoint.CheckpointSaver(background=number == 1)
        if number == 0 and rank == world - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        try:
            checkpoint.save(Path(folder), model, optimizer, VERSION, mesh.dp_group, saving)
            reported.append("saved")
        except CheckpointError as error:
            reported.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        saving.wait()
    return reported


def empty_handed(rank: int, world: int, layout: ParallelDims, start: str, folder: str, config: Any) -> int:
    """Save a model of which some ranks have no row of a parameter, and so no state of it; give how many are so."""
    mesh = FsdpMesh(layout, torch.device("cpu"))
    model = load_fsdp_model(Path(start), spec_from_config(config), mesh, dtype=torch.float32, config=config)
    optimizer = optimizer_for(model)
    stepped(model, optimizer)
    checkpoint.save(Path(folder), model, optimizer, VERSION, mesh.dp_group)
    return sum(not p.numel() for p in model.parameters().values())


def save_alone(folder: Path, model: ShardedParameters, optimizer: Any) -> None:
    folder.mkdir(exist_ok=True)
    checkpoint.save(folder, model, optimizer, VERSION, SINGLE_RANK)
