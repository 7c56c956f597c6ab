"""Models with a scalar head sharded over several ranks by FSDP: the critic of PPO, and the reward model.

Their folders are those of ``LocalCritic`` and ``RewardModel``.

``_R`` some tokens of a micro-batch, ``_r`` those of them on this context-parallel rank, ``D`` hidden.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.backends.fsdp.context_parallel import PackedRows
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.packed_batch import build_rank_batch
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit, single_tensor_unit
from miles.models.checkpoint.sequence_classifier import SCORE, SequenceClassifier, read_score, split_score
from miles.models.checkpoint.value_head import BIAS, HEAD, WEIGHT, read_value_head, value_head_shapes, write_value_head
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch, PackedSequences
from miles.train.model_protocols import KeptTensors, ValueCallback


class FsdpHeadModel:
    """A decoder with a float32 scalar head, which is replicated on every rank and initially zero.

    The decoder's own head, unless it is the embedding, is saved with the model but not trained.
    """

    def __init__(self, backbone: FsdpModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.mesh, self._backbone = backbone.mesh, backbone
        backbone.freeze_head()
        self._head: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=backbone.device))
            for name, shape in shapes.items()
        }

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def backbone(self) -> FsdpModel:
        """The decoder as a model, without the head."""
        return self._backbone

    @property
    def head_parameters(self) -> Mapping[str, Tensor]:
        """The head."""
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

    def run(
        self, micro_batches: Sequence[PackedRows], callback: ValueCallback, *, weight: str, bias: str | None = None
    ) -> list[KeptTensors]:
        """Run forward, and backward if there is a loss, over the head's outputs after the input tokens ``before_R``, in
        float32.
        """
        results: list[KeptTensors] = []
        for index, rows in enumerate(micro_batches):
            batch = build_rank_batch(rows, self.mesh, self._backbone.spec)
            hidden_rD = self._backbone.read(batch).float()
            scalar_r = F.linear(hidden_rD, self._head[weight], None if bias is None else self._head[bias]).squeeze(1)
            loss, kept = callback(index, scalar_r if batch.tokens is None else batch.tokens.join(scalar_r))
            if loss is not None:
                loss.backward()
            results.append(kept)
        return results

    def head_units(self) -> tuple[SaveUnit, ...]:
        """Return what is saved of the head."""
        return tuple(single_tensor_unit(name, value) for name, value in self._head.items())

    @torch.no_grad()
    def set_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the head's tensors."""
        for name, value in self._head.items():
            value.copy_(tensors[name])


class FsdpCritic(FsdpHeadModel):
    """A ValueModel: a linear on the decoder's hidden states."""

    def __init__(self, backbone: FsdpModel) -> None:
        self._shapes = value_head_shapes(backbone.spec.hidden_size)
        super().__init__(backbone, self._shapes)

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback
    ) -> list[KeptTensors]:
        unshared = [rows.without_replay().unshare() for rows in micro_batches]
        return self.run(unshared, callback, weight=WEIGHT, bias=BIAS)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        self.save_head(folder)

    def save_head(self, folder: Path) -> None:
        """Write the value head only."""
        if self.mesh.dp_group.is_lead:
            write_value_head(folder, self._head)
        self._backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        return replace(self._backbone.save_plan(), extra_files={HEAD: self.head_units()})

    def load(self, folder: Path) -> None:
        self._backbone.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        self.set_head(read_value_head(folder, self._shapes))


class FsdpRewardModel(FsdpHeadModel):
    """A ScoreModel: a linear on the hidden state of a sequence's last token. Its folder is transformers' classifier."""

    def __init__(self, backbone: FsdpModel, *, config: Mapping[str, Any]) -> None:
        super().__init__(backbone, {SCORE: (1, backbone.spec.hidden_size)})
        self._classifier = SequenceClassifier(config, backbone.spec.eos_token_ids)

    def freeze_backbone(self) -> None:
        """It is: FSDP wraps parameters that are not trained."""
        assert not any(p.requires_grad for p in self._backbone.parameters().values())

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback
    ) -> list[KeptTensors]:
        return self.run(micro_batches, callback, weight=SCORE)

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        if self.mesh.dp_group.is_lead:
            self._classifier.write_score(folder, self._head[SCORE])
        self._backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        return replace(plan, units=(*plan.units, *self.head_units()), config=self._classifier.build_config(plan.config))

    def load(self, folder: Path) -> None:
        stored, score = split_score(folder)
        self._backbone.load_decoder(folder, stored)
        self.set_head({SCORE: read_score(score, self._backbone.spec.hidden_size)})
