"""Protocols of models in training (policy, critic, reward model), for any backend and any number of ranks.

``_T`` packed input tokens, ``_R`` some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from miles.kernels.numerics import Numerics
from miles.models.checkpoint.save_plan import SavePlan
from miles.models.lora.adapters import LoraAdapters
from miles.models.optim_groups import MuonMatrices
from miles.train.batch_tensors import MicroBatch, PackedSequences
from miles.train.logprobs import HeadOutput
from miles.train.packed_images import PackedImages

if TYPE_CHECKING:
    from miles.train.optim.optimizer import OptimizerProtocol

KeptTensors = Mapping[str, Tensor]
ValueCallback = Callable[[int, Tensor], tuple[Tensor | None, KeptTensors]]
"""Maps a micro-batch index and the values or scores of a model with a scalar head to the loss, if any, and tensors to
keep.
"""
LossCallback = Callable[[int, HeadOutput], tuple[Tensor | None, KeptTensors]]
"""Maps a micro-batch index and the model's output to the loss to differentiate, if any, and tensors to keep."""


class ShardedParameters(Protocol):
    """Live parameters of a checkpoint, of which each rank has a shard.

    In distributed training all ranks make the same calls in the same order. On a single rank ``gather`` and ``cut``
    return their argument.
    """

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Mapping[str, Tensor]:
        """Return this rank's shard of each parameter by name, a tied head once; updated in place, never replaced.

        Parameters that do not require a gradient are not trained.
        """
        ...

    def finalize_grads(self) -> None:
        """Finish gradient reduction after the last backward pass of an optimizer step."""
        ...

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of a sharded gradient, bitwise equal on every rank."""
        ...

    def after_update(self) -> None:
        """Called after the parameters were updated."""
        ...

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Gather the full tensor of parameter ``name``, or of a tensor sharded like it."""
        ...

    def shard(self, name: str, full: Tensor, /) -> Tensor:
        """Return this rank's shard: the inverse of ``gather``."""
        ...

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        """Return the parameters that Muon treats as matrices, with full shapes; empty if unknown."""
        ...

    def move(self, device: torch.device) -> None:
        """Move the parameters to ``device``; they stay the same objects."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model into an existing folder."""
        ...

    def save_plan(self) -> SavePlan | None:
        """Return the plan of what ``save`` writes, for sharded writers; None if only ``save`` can write it."""
        ...

    def load(self, folder: Path) -> None:
        """Load the live parameters from what ``save`` wrote into ``folder``."""
        ...


class TrainModel(ShardedParameters, Protocol):
    """A trainable decoder."""

    @property
    def numerics(self) -> Numerics:
        """The numerics of its layers and of its log-probs."""
        ...

    def forward_backward(self, micro_batches: Sequence[MicroBatch], callback: LossCallback, /) -> list[KeptTensors]:
        """Run forward on each micro-batch, compute its loss by the callback, and run backward if there is a loss.

        Returns the kept tensors in order, on every rank that shares the micro-batch.
        """
        ...


class FrozenModel(Protocol):
    """A model that is not trained: it computes log-probs."""

    def forward_backward(self, micro_batches: Sequence[MicroBatch], callback: LossCallback, /) -> list[KeptTensors]:
        """As that of a TrainModel; called without gradients."""
        ...

    def move(self, device: torch.device) -> None:
        """Move the parameters to ``device``; they stay the same objects."""
        ...

    def load(self, folder: Path) -> None:
        """Load the policy of a checkpoint."""
        ...


@runtime_checkable
class PolicyReference(FrozenModel, Protocol):
    """A reference that shares the weights of the policy in training."""

    def track(self) -> None:
        """Be the policy as it is now, from now on."""
        ...


@runtime_checkable
class HasAdapters(Protocol):
    """A model with trained LoRA adapters (``models.lora``)."""

    def adapters(self) -> LoraAdapters:
        """Return the trained adapters; every rank has all of them in full."""
        ...

    def engine_weights(self) -> dict[str, Tensor]:
        """Return this rank's shard of the weights that an engine uses, in the dtypes that it has."""
        ...


@runtime_checkable
class TorchDistModel(ShardedParameters, Protocol):
    """A model that can be stored in Megatron's distributed checkpoint format; all ranks call at once."""

    def save_torch_dist(
        self,
        folder: Path,
        optimizer: OptimizerProtocol,
        *,
        iteration: int,
        background: bool = False,
        gather_unit: Callable[[str], Tensor] | None = None,
        replicated: Mapping[str, Tensor] | None = None,
    ) -> tuple[bool, Callable[[], None] | None]:
        """Write the weights, and the state of the optimizer if it is Megatron's; returns whether it is.

        With ``gather_unit`` the weights are the full tensors that it returns. ``replicated`` are further ones, which
        every rank has. In the ``background`` they are only copied: a thread of every rank calls the second value,
        which writes them.
        """
        ...

    def find_different_weight(self, folder: Path, gather_unit: Callable[[str], Tensor]) -> str | None:
        """Return the first weight in ``folder`` that differs from the full tensors of ``gather_unit``, on every rank;
        None if all are equal.
        """
        ...

    def load_torch_dist(self, folder: Path, optimizer: OptimizerProtocol) -> None:
        """Load weights and state that ``save_torch_dist`` wrote, in this layout or another."""
        ...


@runtime_checkable
class HasBaseModel(Protocol):
    """A model with adapters over another one, whose weights have the adapters merged into them."""

    @property
    def base_model(self) -> ShardedParameters: ...


def find_torch_dist_model(model: ShardedParameters) -> TorchDistModel | None:
    """Return whose weights can be stored in Megatron's distributed format: the model, or the one under its adapters."""
    inner = model.base_model if isinstance(model, HasBaseModel) else model
    return inner if isinstance(inner, TorchDistModel) else None


def get_engine_weights(model: ShardedParameters) -> dict[str, Tensor]:
    """Return this rank's shard of the weights that an engine uses."""
    if isinstance(model, HasAdapters):
        return model.engine_weights()
    return {name: parameter.detach() for name, parameter in model.parameters().items()}


@runtime_checkable
class ProvidesFeatures(Protocol):
    """A model whose forward can return the features of a draft model."""

    def enable_features(self, layers: Sequence[int]) -> None:
        """Return features from every forward with gradients from now on: the output of ``layers``, side by side; of
        none, the hidden states after the final norm.
        """
        ...


@runtime_checkable
class ReportsTokenTime(Protocol):
    """A model that reports this rank's own compute time."""

    def seconds_per_token(self) -> float | None:
        """Return the compute seconds per token, without waiting, since the last call; None without tokens."""
        ...


@runtime_checkable
class Pipelined(Protocol):
    """A model whose layers may be on several ranks, one after the other."""

    @property
    def pipeline_size(self) -> int:
        """The number of ranks over which its layers are distributed."""
        ...


def is_pipelined(model: ShardedParameters) -> bool:
    """Return whether forward and backward passes of a model's micro-batches are interleaved over several ranks."""
    return isinstance(model, Pipelined) and model.pipeline_size > 1


class ScoreModel(ShardedParameters, Protocol):
    """A decoder with a scalar head: one score per sequence."""

    def forward_backward_scores(
        self, micro_batches: Sequence[PackedSequences], callback: ValueCallback, /
    ) -> list[KeptTensors]:
        """Compute the score of each sequence at its last token, in float32, the loss by the callback, and run backward
        if there is a loss; as that of a TrainModel.
        """
        ...


class ValueModel(ShardedParameters, Protocol):
    """A decoder with a scalar head: one value per token."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context of its forward and backward passes: over the policy's base it sets its adapters."""
        ...

    def forward_backward_values(
        self, micro_batches: Sequence[MicroBatch], callback: ValueCallback, /
    ) -> list[KeptTensors]:
        """Compute the value before each trained token, in float32, the loss by the callback, and run backward if there
        is a loss; as that of a TrainModel.
        """
        ...


class ScoresFn(Protocol):
    """Computes the score of each sequence."""

    def __call__(
        self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], images: PackedImages | None, /
    ) -> Tensor: ...


def run_scores(
    compute: ScoresFn, micro_batches: Sequence[PackedSequences], callback: ValueCallback
) -> list[KeptTensors]:
    """Implement ``forward_backward_scores`` of a ScoreModel that computes one micro-batch at a time."""
    results: list[KeptTensors] = []
    for index, rows in enumerate(micro_batches):
        loss, kept = callback(index, compute(rows.tokens_T, rows.positions_T, rows.lengths, rows.images))
        if loss is not None:
            loss.backward()
        results.append(kept)
    return results


class ValuesFn(Protocol):
    """Computes the values after the input tokens ``at_R``."""

    def __call__(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        at_R: Tensor,
        images: PackedImages | None,
        /,
    ) -> Tensor: ...


def run_values(compute: ValuesFn, micro_batches: Sequence[MicroBatch], callback: ValueCallback) -> list[KeptTensors]:
    """Implement ``forward_backward_values`` of a ValueModel that computes one micro-batch at a time."""
    results: list[KeptTensors] = []
    for index, rows in enumerate(micro_batches):
        rows = rows.unshare()
        values_R = compute(rows.tokens_T, rows.positions_T, rows.lengths, rows.before_R, rows.images)
        loss, kept = callback(index, values_R)
        if loss is not None:
            loss.backward()
        results.append(kept)
    return results
