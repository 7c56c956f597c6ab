"""Value head of a critic's checkpoint: a safetensors file of its own beside the weights of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.models.checkpoint.safetensors_io import write_atomically

HEAD = "value_head.safetensors"
WEIGHT, BIAS = "value_head.weight", "value_head.bias"


def value_head_shapes(hidden_size: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the head's tensors.

    >>> value_head_shapes(8)
    {'value_head.weight': (1, 8), 'value_head.bias': (1,)}
    """
    return {WEIGHT: (1, hidden_size), BIAS: (1,)}


def write_value_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Write the head into an existing folder."""
    blob = save({name: value.detach().cpu() for name, value in head.items()})
    write_atomically(folder / HEAD, lambda file: file.write(blob))


def read_value_head(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read the head of the critic in ``folder``, which must have these shapes."""
    try:
        found = load((folder / HEAD).read_bytes())
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"{folder / HEAD} cannot be read ({cause}); use another checkpoint.") from cause
    if {name: tuple(value.shape) for name, value in found.items()} != dict(shapes):
        raise CheckpointError(f"{folder / HEAD} does not match the critic in training.")
    return found
