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
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.local_model import LocalHeadModel
from miles.models.base import CausalLM
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.value_head import BIAS, HEAD, WEIGHT, read_value_head, value_head_shapes, write_value_head
from miles.models.optim_groups import TRAINED_VISION, FrozenVision
from miles.train.batch_tensors import MicroBatch
from miles.train.model_protocols import KeptTensors, ValueCallback, run_values
from miles.train.packed_images import PackedImages


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
        super().__init__(
            decoder,
            value_head_shapes(decoder.spec.hidden_size),
            config=config,
            like=like,
            gradient_checkpointing=gradient_checkpointing,
            frozen_vision=frozen_vision,
        )

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback
    ) -> list[KeptTensors]:
        return run_values(self.values, micro_batches, callback)

    def values(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        at_R: Tensor,
        images: PackedImages | None = None,
    ) -> Tensor:
        """Return the values after the input tokens ``at_R``, in float32; sequences are concatenated."""
        hidden_TD = self._backbone.read(tokens_T, positions_T, lengths, None, images=images).hidden_TD
        hidden_RD = hidden_TD.index_select(0, at_R).to(torch.float32)
        return F.linear(hidden_RD, self._head[WEIGHT], self._head[BIAS]).squeeze(1)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        self.save_head(folder)

    def save_head(self, folder: Path) -> None:
        """Write the value head only."""
        write_value_head(folder, self._head)

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        head = tuple(single_tensor_unit(name, value) for name, value in self._head.items())
        return None if plan is None else replace(plan, extra_files={HEAD: head})

    def load(self, folder: Path) -> None:
        self._backbone.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        found = read_value_head(folder, value_head_shapes(self._backbone.spec.hidden_size))
        with torch.no_grad():
            for name, value in self._head.items():
                value.copy_(found[name])
