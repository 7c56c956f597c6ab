"""Megatron models with a scalar head: the critic of PPO, and the reward model.

The last stage has the decoder's hidden states and the head; the values are broadcast to all stages. Over a decoder that
is frozen, under adapters, every rank has the head in full, as it has the adapters.

``_R`` some tokens of a micro-batch, ``_r`` those of them on this context-parallel rank, ``D`` hidden.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.backends.megatron.model import MegatronModel
from miles.core.errors import CheckpointError
from miles.models.checkpoint.save_plan import SavePlan, SaveUnit, single_tensor_unit
from miles.models.checkpoint.sequence_classifier import SCORE, SequenceClassifier, read_score, split_score
from miles.models.checkpoint.torch_dist import TorchDistReader
from miles.models.checkpoint.torch_dist_folders import is_torch_dist
from miles.models.checkpoint.value_head import BIAS, HEAD, WEIGHT, read_value_head, value_head_shapes, write_value_head
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch, PackedSequences
from miles.train.config import TrainConfig
from miles.train.dp_group import DataParallelGroup
from miles.train.logprobs import HeadOutput
from miles.train.model_protocols import KeptTensors, ValueCallback
from miles.train.optim.lr_scheduler import LRSchedule
from miles.train.optim.optimizer import OptimizerProtocol


def _compute_scalars(output: HeadOutput, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the output of a scalar head for each token, in float32."""
    scalar_r = F.linear(output.hidden_RD.float(), weight, bias).squeeze(1)
    return scalar_r if output.tokens is None else output.tokens.join(scalar_r)


def read_torch_dist_score(folder: Path, hidden_size: int) -> Tensor:
    """Read the score weight of a distributed checkpoint; CheckpointError if it is of another model."""
    reader = TorchDistReader(folder)
    if reader.shapes().get(SCORE) != (1, hidden_size):
        raise CheckpointError(
            f"{folder} has no {SCORE} of {hidden_size} columns, so it is not this reward model; use another checkpoint."
        )
    return reader.read(SCORE)


class MegatronHeadModel:
    """A decoder with a scalar head, float32 and initially zero: ``backbone`` was loaded with that head."""

    def __init__(self, backbone: MegatronModel, *, weight: str, bias: str | None = None) -> None:
        assert weight in backbone.scalar_head, "the backbone is loaded with the shapes of its head"
        self._backbone = backbone
        self._weight = weight
        self._bias = bias

    @property
    def device(self) -> torch.device:
        return self._backbone.device

    @property
    def dp_group(self) -> DataParallelGroup:
        return self._backbone.dp_group

    def parameters(self) -> Mapping[str, Tensor]:
        return self._backbone.parameters()

    def finalize_grads(self) -> None:
        self._backbone.finalize_grads()

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        return self._backbone.norm(grads)

    def after_update(self) -> None:
        self._backbone.after_update()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return self._backbone.gather(name, local)

    def shard(self, name: str, full: Tensor) -> Tensor:
        return self._backbone.shard(name, full)

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        return self._backbone.muon_matrices()

    def move(self, device: torch.device) -> None:
        self._backbone.move(device)

    def optimizer(self, train: TrainConfig, schedule: LRSchedule, *, lr_flag: str) -> OptimizerProtocol | None:
        """Build Megatron's distributed optimizer if it was selected, over the decoder and its head."""
        return self._backbone.optimizer(train, schedule, lr_flag=lr_flag)

    def compute_scalars(self, output: HeadOutput) -> Tensor:
        """Return the head's output of each token, in float32; on the last stage."""
        params = self._backbone.parameters()
        return _compute_scalars(output, params[self._weight], None if self._bias is None else params[self._bias])

    def head_units(self) -> tuple[SaveUnit, ...]:
        """Return what is saved of the head."""
        shapes = self._backbone.scalar_head.items()
        return tuple(single_tensor_unit(name, torch.empty(shape, device="meta")) for name, shape in shapes)

    def gather_head(self) -> dict[str, Tensor]:
        """Return the head's tensors on every rank."""
        params = self._backbone.parameters()
        return {name: self._backbone.gather(name, params[name].detach()) for name in self._backbone.scalar_head}

    @torch.no_grad()
    def set_head(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the head's tensors on the ranks that have them."""
        params = self._backbone.parameters()
        for name in self._backbone.scalar_head:
            params[name].copy_(self._backbone.shard(name, tensors[name]))


class MegatronCritic(MegatronHeadModel):
    """A ValueModel: a linear on the decoder's hidden states. Its folder is that of every other backend's critic."""

    def __init__(self, backbone: MegatronModel) -> None:
        super().__init__(backbone, weight=WEIGHT, bias=BIAS)

    def in_use(self) -> AbstractContextManager[None]:
        return nullcontext()

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback
    ) -> list[KeptTensors]:
        unshared = [rows.without_replay().unshare() for rows in micro_batches]
        return self._backbone.forward_backward(unshared, lambda i, output: callback(i, self.compute_scalars(output)))

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        head = self.gather_head()
        if self.dp_group.is_lead:
            write_value_head(folder, head)
        self._backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        return replace(self._backbone.save_plan(), extra_files={HEAD: self.head_units()})

    def load(self, folder: Path) -> None:
        self._backbone.load(folder)
        self.load_head(folder)

    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        self.set_head(read_value_head(folder, self._backbone.scalar_head))


class MegatronRewardModel(MegatronHeadModel):
    """A ScoreModel: a linear on the hidden state of a sequence's last token. Its folder is transformers' classifier."""

    def __init__(self, backbone: MegatronModel, *, config: Mapping[str, Any]) -> None:
        super().__init__(backbone, weight=SCORE)
        self._classifier = SequenceClassifier(config, backbone.spec.eos_token_ids)

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback
    ) -> list[KeptTensors]:
        return self._backbone.forward_backward(
            micro_batches, lambda i, output: callback(i, self.compute_scalars(output))
        )

    def save(self, folder: Path) -> None:
        self._backbone.save(folder)
        score = self.gather_head()[SCORE]
        if self.dp_group.is_lead:
            self._classifier.write_score(folder, score)
        self._backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        plan = self._backbone.save_plan()
        return replace(plan, units=(*plan.units, *self.head_units()), config=self._classifier.build_config(plan.config))

    def save_torch_dist(
        self, folder: Path, optimizer: OptimizerProtocol, **how: Any
    ) -> tuple[bool, Callable[[], None] | None]:
        """Write Megatron's distributed checkpoint, with the score head."""
        return self._backbone.save_torch_dist(folder, optimizer, **how)

    def load_torch_dist(self, folder: Path, optimizer: OptimizerProtocol) -> None:
        """Load weights and Megatron's optimizer from its distributed checkpoint, of any layout."""
        read_torch_dist_score(folder, self._backbone.spec.hidden_size)
        self._backbone.load_torch_dist(folder, optimizer)

    def find_different_weight(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> str | None:
        """Return the first weight of the decoder in a checkpoint that differs from the full ones of ``gather_unit``."""
        return self._backbone.find_different_weight(folder, gather_unit)

    def load(self, folder: Path) -> None:
        if is_torch_dist(folder):
            read_torch_dist_score(folder, self._backbone.spec.hidden_size)
            self._backbone.load(folder)
            return
        stored, score = split_score(folder)
        self._backbone.load_decoder(folder, self._backbone.spec, stored)
        self.set_head({SCORE: read_score(score, self._backbone.spec.hidden_size)})


class ReplicatedHead:
    """A float32 scalar head over a frozen ``backbone``, initially zero, which every rank has in full."""

    def __init__(self, backbone: MegatronModel, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.backbone = backbone
        self._head: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=backbone.device))
            for name, shape in shapes.items()
        }

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def head_parameters(self) -> Mapping[str, Tensor]:
        """The head."""
        return self._head

    def finalize_grads(self) -> None:
        """All-reduce the gradients; that of a head without one, as on other stages, is zero."""
        self.backbone.finalize_grads()
        state = self.backbone.state
        for parameter in self._head.values():
            # Tensor-parallel ranks have the same gradient, all others that of other tokens.
            grad = parameter.grad if state.tp_group.rank == 0 else None
            parameter.grad = state.world_group.sum(torch.zeros_like(parameter) if grad is None else grad)


class MegatronValueHead(ReplicatedHead):
    """A HeadCritic: a value head over the decoder of a policy with adapters."""

    def __init__(self, backbone: MegatronModel) -> None:
        super().__init__(backbone, value_head_shapes(backbone.spec.hidden_size))

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback
    ) -> list[KeptTensors]:
        unshared = [rows.without_replay().unshare() for rows in micro_batches]
        weight, bias = self._head[WEIGHT], self._head[BIAS]
        return self.backbone.forward_backward(
            unshared, lambda i, output: callback(i, _compute_scalars(output, weight, bias)), is_policy=False
        )

    def save_head(self, folder: Path) -> None:
        """Write the value head only."""
        if self.backbone.dp_group.is_lead:
            write_value_head(folder, self._head)
        self.backbone.barrier()

    @torch.no_grad()
    def load_head(self, folder: Path) -> None:
        """Load the value head only."""
        found = read_value_head(folder, value_head_shapes(self.backbone.spec.hidden_size))
        for name, value in self._head.items():
            value.copy_(found[name])


class MegatronScoreHead(ReplicatedHead):
    """A HeadRewardModel. Its folder is transformers' classifier, as that of a MegatronRewardModel."""

    def __init__(self, backbone: MegatronModel, *, config: Mapping[str, Any]) -> None:
        super().__init__(backbone, {SCORE: (1, backbone.spec.hidden_size)})
        self._classifier = SequenceClassifier(config, backbone.spec.eos_token_ids)

    def freeze_backbone(self) -> None:
        """It is: Megatron's modules are built so."""
        assert not any(p.requires_grad for p in self.backbone.parameters().values())

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback
    ) -> list[KeptTensors]:
        weight = self._head[SCORE]
        return self.backbone.forward_backward(
            micro_batches, lambda i, output: callback(i, _compute_scalars(output, weight))
        )

    def save(self, folder: Path) -> None:
        self.backbone.save(folder)
        if self.backbone.dp_group.is_lead:
            self._classifier.write_score(folder, self._head[SCORE])
        self.backbone.barrier()

    def save_plan(self) -> SavePlan | None:
        plan = self.backbone.save_plan()
        score = single_tensor_unit(SCORE, self._head[SCORE])
        return replace(plan, units=(*plan.units, score), config=self._classifier.build_config(plan.config))

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        if is_torch_dist(folder):
            self._head[SCORE].copy_(read_torch_dist_score(folder, self.backbone.spec.hidden_size))
            self.backbone.load(folder)
            return
        stored, score = split_score(folder)
        self.backbone.load_decoder(folder, self.backbone.spec, stored)
        self._head[SCORE].copy_(read_score(score, self.backbone.spec.hidden_size))
