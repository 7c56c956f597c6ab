"""Critic in one process: a decoder with a value head.

Besides the weights of a Hugging Face model its folder has the value head, in a file of its own.

``_T`` packed input tokens, ``_R`` some of them, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.local_model import LocalHeadModel
from miles.core.errors import CheckpointError
from miles.models.base import CausalLM
from miles.models.checkpoint.safetensors_io import write_atomically
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.train.packed_images import PackedImages

HEAD = "value_head.safetensors"
_WEIGHT, _BIAS = "value_head.weight", "value_head.bias"


class LocalCritic(LocalHeadModel):
    """A ValueModel over ``decoder``: a float32 linear on its hidden states."""

    def __init__(
        self,
        decoder: CausalLM,
        *,
        config: Mapping[str, Any] | None = None,
        like: Path | None = None,
        gradient_checkpointing: bool = False,
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        shapes = {_WEIGHT: (1, decoder.spec.hidden_size), _BIAS: (1,)}
        super().__init__(
            decoder,
            shapes,
            config=config,
            like=like,
            gradient_checkpointing=gradient_checkpointing,
            frozen_vision=frozen_vision,
        )

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def values(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        at_R: Tensor,
        images: PackedImages | None = None,
    ) -> Tensor:
        hidden_TD = self._backbone.read(tokens_T, positions_T, lengths, None, images=images).hidden_TD
        hidden_RD = hidden_TD.index_select(0, at_R).to(torch.float32)
        return F.linear(hidden_RD, self._head[_WEIGHT], self._head[_BIAS]).squeeze(1)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        self.save_head(folder)

    def save_head(self, folder: Path) -> None:
        """Write the value head only."""
        blob = save({name: value.detach().cpu() for name, value in self._head.items()})
        write_atomically(folder / HEAD, lambda file: file.write(blob))

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        head = tuple(single_tensor_unit(name, value) for name, value in self._head.items())
        return None if plan is None else replace(plan, extra_files={HEAD: head})

    def load(self, folder: Path) -> None:
        self._backbone.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        load_value_head(folder, self._head)


@torch.no_grad()
def load_value_head(folder: Path, head: Mapping[str, Tensor]) -> None:
    """Load a critic's value head from ``folder``."""
    try:
        found = load((folder / HEAD).read_bytes())
    except (OSError, SafetensorError) as cause:
        raise CheckpointError(f"{folder / HEAD} cannot be read ({cause}); use another checkpoint.") from cause
    if {name: value.shape for name, value in found.items()} != {n: v.shape for n, v in head.items()}:
        raise CheckpointError(f"{folder / HEAD} does not match the critic in training.")
    for name, value in head.items():
        value.copy_(found[name])
