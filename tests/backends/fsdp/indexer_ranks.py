"""A step that replays what indexers of blocks selected, over tensor-parallel ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.megatron.cases import stepped

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Sample
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config


def replay_on_ranks(
    rank: int,
    world: int,
    folder: Path,
    layouts: Sequence[ParallelDims],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
) -> list[dict[str, Any]]:
    """Metrics, gradients and weights of the step in each layout."""
    found: list[dict[str, Any]] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, torch.device("cpu"))
        config = read_config(folder)
        model = load_fsdp_model(folder, spec_from_config(config), mesh, dtype=torch.float32, config=config)
        found.append(stepped(model, batch, mesh.dp_group, algo))
        del found[-1]["trainer"]
    return found
