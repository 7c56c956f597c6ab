"""Adapters of upstream's loss, importance-sampling correction and loss reducer to our protocols.

Such functions see one list entry per sample, with the trained tokens alone: their loss masks are all 1.

``_R``: one entry per trained token of this micro-batch. ``_N``: one entry per trajectory of the global batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.algo.loss_aggregation import LossAggregator, Reducer
from miles.algo.policy_loss import Correction, LossFn, LossInputs, LossOutput, TokenWeights
from miles.core.errors import HookError
from miles.hooks.compat.types import UpstreamContext


@dataclass(frozen=True, slots=True)
class PolicyLogits:
    """The logits of a micro-batch, for ``get_log_probs_and_entropy``: they are never in memory as one tensor."""

    inputs: LossInputs

    def sum(self) -> Tensor:
        """A zero with a gradient, for the term ``0 * logits.sum()`` of a loss without tokens."""
        return 0.0 * self.inputs.logp_R.sum()

    def __getattr__(self, name: str) -> Any:
        raise HookError(
            f"A loss read logits.{name}, and logits are not kept as one tensor; call get_log_probs_and_entropy(logits, "
            "...) of miles.backends.training_utils.loss."
        )


@dataclass(frozen=True, slots=True)
class LossParallelState:
    """The parallel layout a loss sees: its tokens are all on this rank."""

    cp_size: int = 1
    cp_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0


class _LossBatch(dict[str, Any]):
    """The data of a micro-batch by upstream's names."""

    def __missing__(self, name: str) -> Any:
        raise HookError(f"A loss read batch[{name!r}], which this run has not; there are {', '.join(self)}.")


def get_log_probs_and_entropy(logits: PolicyLogits, **_: Any) -> dict[str, list[Tensor]]:
    """The log-probs and entropies of a micro-batch's trained tokens, a tensor for each sample."""
    inputs = logits.inputs
    return {"log_probs": _split(inputs, inputs.logp_R), "entropy": _split(inputs, inputs.entropy_R)}


def all_gather_with_cp(tensor: Tensor, total_length: int, response_length: int, *_: Any, **__: Any) -> Tensor:
    """The values of a sample's tokens on all ranks: those of this one."""
    return tensor


def slice_log_prob_with_cp(log_prob: Any, total_length: int, response_length: int, *_: Any, **__: Any) -> Any:
    """The values of a sample's tokens on this rank: all of them."""
    return log_prob


def adapt_loss(function: Callable[..., Any], run: UpstreamContext) -> LossFn:
    """``f(args, [parallel_state,] batch, logits, sum_of_sample_mean) -> (loss, metrics)``."""
    _check_context_parallel(run)
    state = [LossParallelState()] if "parallel_state" in inspect.signature(function).parameters else []

    def compute(inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
        result = function(run.args, *state, _build_batch(inputs), PolicyLogits(inputs), aggregator.reduce)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], Tensor):
            raise HookError(f"{run.source} returned no loss with its metrics; return a scalar tensor and a dict.")
        loss, metrics = result
        parts = {name: torch.as_tensor(part).detach() for name, part in metrics.items()}
        return LossOutput(loss=loss, metrics=parts | {"loss": loss.detach()})

    return compute


def adapt_correction(function: Callable[..., Any], run: UpstreamContext) -> Correction:
    """``f(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, ...) -> (pg_loss, masks, metrics)``.

    It is called with a ``pg_loss`` of ones, so that what it returns is the weight of each token. A masked token has the
    weight 0, and still counts in the mean.
    """
    _check_context_parallel(run)
    parameters = inspect.signature(function).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters}

    def correct(inputs: LossInputs, aggregator: LossAggregator) -> TokenWeights:
        lengths = _count_tokens(inputs)
        ones_R = torch.ones_like(inputs.engine_logp_R)
        values: dict[str, Any] = {
            "args": run.args,
            "pg_loss": ones_R,
            "train_log_probs": _split(inputs, inputs.old_logp_R.detach()),
            "rollout_log_probs": _split(inputs, inputs.engine_logp_R),
            "loss_masks": _split(inputs, ones_R),
            "total_lengths": lengths,
            "response_lengths": lengths,
        }
        result = function(**{name: value for name, value in values.items() if takes_all or name in taken})
        if not isinstance(result, tuple) or len(result) != 3:
            raise HookError(f"{run.source} returns three values: the pg_loss, the loss masks and a dict of metrics.")
        weight_R, masks, metrics = result
        weight_R = weight_R.detach() * torch.cat([*masks]).to(weight_R)
        return TokenWeights(weight_R=weight_R, metrics=_average(metrics, ones_R, aggregator))

    return correct


def adapt_reducer(function: Callable[..., Any], run: UpstreamContext) -> Reducer:
    """``f(total_lengths, response_lengths, loss_masks[, calculate_per_token_loss])``, which returns a function from
    token values to their sum; the weight of a token is the gradient of that sum."""
    per_token = bool(run.args.calculate_per_token_loss) if "calculate_per_token_loss" in run.args else False
    extra_arguments = [per_token] if len(inspect.signature(function).parameters) > 3 else []

    def weigh(counts_N: Sequence[int]) -> NDArray[np.float64]:
        lengths = [int(count) for count in counts_N]
        values_R = torch.zeros(sum(lengths), dtype=torch.float64, requires_grad=True)
        masks = [torch.ones(length, dtype=torch.float64) for length in lengths]
        with torch.enable_grad():
            total = function(lengths, lengths, masks, *extra_arguments)(values_R)
        if not isinstance(total, Tensor) or total.numel() != 1:
            raise HookError(f"{run.source} returns a function from the values of tokens to one number.")
        (weights_R,) = torch.autograd.grad(total, values_R)
        parts = weights_R.split(lengths)
        if any(len(part) and not torch.equal(part, part[:1].expand_as(part)) for part in parts):
            raise HookError(f"{run.source} weights the tokens of one sample differently; give each the same weight.")
        divisor = max(sum(lengths) if per_token else len(lengths), 1)
        return np.array([float(part[0]) / divisor if len(part) else 0.0 for part in parts], np.float64)

    return weigh


def _build_batch(inputs: LossInputs) -> _LossBatch:
    lengths = _count_tokens(inputs)
    batch = _LossBatch(
        advantages=_split(inputs, inputs.advantage_R),
        log_probs=_split(inputs, inputs.old_logp_R.detach()),
        rollout_log_probs=_split(inputs, inputs.engine_logp_R),
        loss_masks=_split(inputs, torch.ones_like(inputs.engine_logp_R)),
        response_lengths=lengths,
        total_lengths=lengths,
        unconcat_tokens=[],  # only passed on to get_log_probs_and_entropy
    )
    if inputs.ref_logp_R is not None:
        batch["ref_log_probs"] = _split(inputs, inputs.ref_logp_R)
    return batch


def _count_tokens(inputs: LossInputs) -> list[int]:
    return torch.bincount(inputs.sample_R, minlength=inputs.samples).tolist()


def _split(inputs: LossInputs, values_R: Tensor) -> list[Tensor]:
    return list(values_R.split(_count_tokens(inputs)))


def _average(metrics: Mapping[str, Any], ones_R: Tensor, aggregator: LossAggregator) -> dict[str, Tensor]:
    parts: dict[str, Tensor] = {}
    for name, value in metrics.items():
        values_R = (
            torch.cat([*value]) if isinstance(value, list | tuple) else torch.as_tensor(value, device=ones_R.device)
        )
        parts[name] = aggregator.mean(values_R.detach().to(ones_R).expand_as(ones_R))
    return parts


def _check_context_parallel(run: UpstreamContext) -> None:
    if "context_parallel_size" in run.args and run.args.context_parallel_size > 1:
        raise HookError(
            f"{run.source} sees whole samples, and --context-parallel-size splits them over ranks; write it as a "
            "function of LossInputs and a LossAggregator, or set --context-parallel-size 1."
        )
