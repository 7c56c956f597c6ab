"""A sharded model with the weights of a folder."""

from pathlib import Path
from typing import Any

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.models.spec import DecoderSpec


def load_fsdp_model(folder: Path, spec: DecoderSpec, mesh: FsdpMesh, **options: Any) -> FsdpModel:
    model = FsdpModel(spec, mesh, **options)
    model.load(folder)
    return model
