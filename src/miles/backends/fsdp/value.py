"""A decoder with a value head: the critic, held whole by this process.

Beside the weights of a Hugging Face model its folder has the head, in a file of its own.

``_T`` packed input tokens, ``_R`` some of them, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from miles.backends.fsdp.model import FsdpModel
from miles.core.errors import CheckpointError
from miles.models.door import Model
from miles.models.files import void, write_whole
from miles.models.matrices import Matrices
from miles.models.outline import Outline, lone_unit
from miles.train.optim import whole_norm

HEAD = "value_head.safetensors"


class FsdpValue:
    """A ValueModel over ``decoder``: one linear on its hidden states, in float32 whatever they are.

    A new head is zero: at first nothing is expected. The decoder's own head, where it is not the embedding, is kept for
    the folder's sake and not trained.
    """

    def __init__(
        self,
        decoder: Model,
        *,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self._trunk = FsdpModel(decoder, config=config, like=like, gradient_checkpointing=gradient_checkpointing)
        if not decoder.spec.tie_embeddings:
            decoder.head().requires_grad_(False)
        device, width = self._trunk.device, decoder.spec.hidden_size
        self._weight_1D = nn.Parameter(torch.zeros(1, width, dtype=torch.float32, device=device))
        self._bias_1 = nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
        self._head: dict[str, Tensor] = {"value_head.weight": self._weight_1D, "value_head.bias": self._bias_1}

    @property
    def device(self) -> torch.device:
        return self._trunk.device

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._trunk.parameters(), **self._head}

    def settle(self) -> None:
        """Gradients are whole as they come."""

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return whole_norm(grads)

    def updated(self) -> None:
        """There are no copies of the parameters."""

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole

    def matrices(self) -> Mapping[str, Matrices]:
        return self._trunk.matrices()

    def values(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], at_R: Tensor) -> Tensor:
        hidden_TD = self._trunk.read(tokens_T, positions_T, lengths, None).hidden_TD
        hidden_RD = hidden_TD.index_select(0, at_R).to(self._weight_1D.dtype)
        return nn.functional.linear(hidden_RD, self._weight_1D, self._bias_1).squeeze(1)

    def move(self, device: torch.device) -> None:
        for parameter in self.parameters().values():
            parameter.data = parameter.data.to(device)

    def save(self, folder: Path) -> None:
        self._trunk.save(folder)
        blob = save({name: value.detach().cpu() for name, value in self._head.items()})
        write_whole(folder / HEAD, lambda file: void(file.write(blob)))

    def outline(self) -> Outline | None:
        trunk = self._trunk.outline()
        head = tuple(lone_unit(name, value) for name, value in self._head.items())
        return None if trunk is None else replace(trunk, apart={HEAD: head})

    def load(self, folder: Path) -> None:
        self._trunk.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Fill the head alone."""
        fill_head(folder, self._head)


@torch.no_grad()
def fill_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Fill a critic's ``head`` with the one in ``folder``."""
    try:
        found = load((folder / HEAD).read_bytes())
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"{folder / HEAD} cannot be read ({cause}); use another checkpoint.") from cause
    if {name: value.shape for name, value in found.items()} != {n: v.shape for n, v in head.items()}:
        raise CheckpointError(f"{folder / HEAD} is the head of another critic than the one in training.")
    for name, value in head.items():
        value.copy_(found[name])
