"""Critic sharded over several ranks by FSDP; its folder is that of ``LocalCritic``.

``_T`` packed input tokens, ``_R`` some of them, ``_r`` those of these that are this rank's, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.packed_batch import PackedText, build_rank_batch
from miles.models.checkpoint.save_plan import SavePlan, single_tensor_unit
from miles.models.checkpoint.value_head import BIAS, HEAD, WEIGHT, read_value_head, value_head_shapes, write_value_head
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch
from miles.train.model_protocols import KeptTensors, ValueCallback, run_values
from miles.train.packed_images import PackedImages


class FsdpCritic:
    """A ValueModel: a float32 linear on the decoder's hidden states, replicated on every rank and initially zero.

    The decoder's own head, unless it is the embedding, is saved with the model but not trained.
    """

    def __init__(self, backbone: FsdpModel) -> None:
        self.mesh, self._backbone = backbone.mesh, backbone
        backbone.freeze_head()
        self._shapes = value_head_shapes(backbone.spec.hidden_size)
        self._head: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=backbone.device))
            for name, shape in self._shapes.items()
        }

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def head_parameters(self) -> Mapping[str, Tensor]:
        """The value head."""
        return self._head

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._backbone.parameters(), **self._head}

    def finalize_grads(self) -> None:
        self._backbone.finalize_grads()
        for parameter in self._head.values():
            if parameter.grad is not None:
                # Ranks with other samples or tokens have partial sums; tensor-parallel ranks have the same gradient.
                parameter.grad = self.mesh.dp_cp_group.sum(parameter.grad)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        squares = self._backbone.squares({name: grad for name, grad in grads.items() if name not in self._head})
        if self.mesh.rank == 0:
            for name in self._head:
                if name in grads:
                    squares = squares + grads[name].double().square().sum()
        return self.mesh.world_group.sum(squares).sqrt().float()

    def after_update(self) -> None:
        self._backbone.after_update()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local if name in self._head else self._backbone.gather(name, local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return full if name in self._head else self._backbone.shard(name, full)

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return self._backbone.muon_matrices()

    def move(self, device: torch.device) -> None:
        self._backbone.move(device)
        for parameter in self._head.values():
            parameter.data = parameter.data.to(device)

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
        text = PackedText(lengths=lengths, tokens_T=tokens_T, positions_T=positions_T, before_R=at_R, images=images)
        batch = build_rank_batch(text, self.mesh, self._backbone.spec)
        hidden_rD = self._backbone.read(batch).float()
        values_r = F.linear(hidden_rD, self._head[WEIGHT], self._head[BIAS]).squeeze(1)
        return values_r if batch.tokens is None else batch.tokens.join(values_r)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        self.save_head(folder)

    def save_head(self, folder: Path) -> None:
        """Write the value head only."""
        if self.mesh.dp_group.is_lead:
            write_value_head(folder, self._head)
        self._backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        head = tuple(single_tensor_unit(name, value) for name, value in self._head.items())
        return replace(self._backbone.save_plan(), extra_files={HEAD: head})

    def load(self, folder: Path) -> None:
        self._backbone.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        found = read_value_head(folder, self._shapes)
        with torch.no_grad():
            for name, value in self._head.items():
                value.copy_(found[name])
