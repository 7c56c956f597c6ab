"""Built-in losses of the Tinker API: sums over tokens of one datum, from its log-probs and what its request sent.

``logp`` are the log-probs of the targets under the current weights, ``sampled`` those they were sampled with (the
input ``logprobs``), ``A`` the advantages, ratio = exp(logp - sampled), ``sg`` stops the gradient:

    cross_entropy         -w logp
    importance_sampling   -ratio A
    ppo                   -min(ratio A, clip(ratio, low, high) A)
    cispo                 -sg(clip(ratio, low, high)) logp A
    dro                   -(logp A - beta / 2 (logp - sampled)^2)
    gspo                  ppo with the ratio of the sequence, exp(mean of logp - sampled over its marked tokens)

Shapes: N tokens of a datum; cross_entropy also takes [N, K], K targets of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from miles.rollout.serving.errors import RequestError

__all__ = ["LOSSES", "Inputs", "check_inputs", "compute_loss", "get_number"]

Inputs = Mapping[str, Tensor]
Config = Mapping[str, float | str]

_CLIP_LOW, _CLIP_HIGH = 0.8, 1.2
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_BETA = 0.05


def _cross_entropy(logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -(logp * inputs["weights"]) if "weights" in inputs else -logp


def _importance_sampling(logp_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return -((logp_N - inputs["logprobs"]).exp() * inputs["advantages"])


def _clip(ratio_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Clip by the thresholds of each token if the datum has them, else by those of the request."""
    low = inputs.get(_LOW, torch.full_like(ratio_N, get_number(config, _LOW, _CLIP_LOW)))
    high = inputs.get(_HIGH, torch.full_like(ratio_N, get_number(config, _HIGH, _CLIP_HIGH)))
    return torch.minimum(torch.maximum(ratio_N, low), high)


def _pessimistic(ratio_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    advantages_N = inputs["advantages"]
    return -torch.minimum(ratio_N * advantages_N, _clip(ratio_N, inputs, config) * advantages_N)


def _ppo(logp_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    return _pessimistic((logp_N - inputs["logprobs"]).exp(), inputs, config)


def _cispo(logp_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    ratio_N = (logp_N.detach() - inputs["logprobs"]).exp()
    return -_clip(ratio_N, inputs, config) * logp_N * inputs["advantages"]


def _dro(logp_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    beta = get_number(config, "beta", _BETA)
    return -(logp_N * inputs["advantages"] - 0.5 * beta * (logp_N - inputs["logprobs"]).square())


def _gspo(logp_N: Tensor, inputs: Inputs, config: Config) -> Tensor:
    gap_N = logp_N.detach() - inputs["logprobs"]
    mask_N = inputs["sequence_ratio_mask"] != 0
    mean = gap_N[mask_N].mean() if bool(mask_N.any()) else gap_N.new_zeros(())
    return _pessimistic((mean + logp_N - logp_N.detach()).exp(), inputs, config)


Loss = Callable[[Tensor, Inputs, Config], Tensor]

LOSSES: Mapping[str, tuple[Loss, frozenset[str], frozenset[str]]] = {
    "cross_entropy": (_cross_entropy, frozenset(), frozenset({"weights"})),
    "importance_sampling": (_importance_sampling, frozenset({"logprobs", "advantages"}), frozenset()),
    "ppo": (_ppo, frozenset({"logprobs", "advantages"}), frozenset({_LOW, _HIGH})),
    "cispo": (_cispo, frozenset({"logprobs", "advantages"}), frozenset({_LOW, _HIGH})),
    "dro": (_dro, frozenset({"logprobs", "advantages"}), frozenset()),
    "gspo": (_gspo, frozenset({"logprobs", "advantages", "sequence_ratio_mask"}), frozenset({_LOW, _HIGH})),
}
"""Name -> the loss of each token, the inputs it needs beside ``target_tokens``, and those it may have."""


def get_number(config: Config, name: str, default: float) -> float:
    """Return a number of a loss's config."""
    value = config.get(name, default)
    if isinstance(value, str):
        raise RequestError(f"loss_fn_config {name} is {value!r}, must be a number.", status=422)
    return value


def check_inputs(loss_fn: str, inputs: Mapping[str, tuple[int, ...]], datum: int) -> None:
    """RequestError if the loss is unknown, or if a datum's inputs (name -> shape) are not what it needs."""
    if loss_fn not in LOSSES:
        raise RequestError(f"there is no loss {loss_fn!r}; use {', '.join(LOSSES)}.", status=422)
    _, needed, optional = LOSSES[loss_fn]
    for name in sorted({"target_tokens", *needed} - inputs.keys()):
        raise RequestError(f"datum {datum} has no {name}, which the loss {loss_fn} needs.", status=422)
    shape = inputs["target_tokens"]
    if len(shape) not in ((1, 2) if loss_fn == "cross_entropy" else (1,)):
        raise RequestError(f"target_tokens of datum {datum} have the shape {shape}, must be one per token.", status=422)
    for name in sorted((needed | optional) & inputs.keys()):
        if inputs[name] != shape:
            raise RequestError(
                f"{name} of datum {datum} has the shape {inputs[name]}, but target_tokens have {shape}.", status=422
            )


def compute_loss(loss_fn: str, logp: Tensor, inputs: Inputs, config: Config) -> Tensor:
    """Return the loss of each target of a datum; the loss of the datum is their sum."""
    return LOSSES[loss_fn][0](logp, inputs, config)
