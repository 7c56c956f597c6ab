"""Batch-invariant MoE router: scores, top-k selection and weights, one implementation for engine and trainer.

Shapes: T tokens, E experts, k experts per token. Scores are float32 at least; ties go to the first expert; a token's
weights are summed in the order of its choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.batch_invariant.activation import softplus
from miles.kernels.batch_invariant.elementwise import accumulation_dtype, sigmoid, softmax
from miles.kernels.runtime.triton_compat import (
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)

# Keeps the weights of experts with zero probability from becoming 0 / 0.
EPS = 1e-20


def stable_topk(scores_TE: Tensor, count: int) -> Tensor:
    """The ``count`` highest of each row, highest first; ties go to the first."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def sum_choices(x_Tk: Tensor) -> Tensor:
    """The sum over a token's choices, [T, 1], one after the other."""
    total_T1 = x_Tk[:, :1]
    for choice in range(1, x_Tk.shape[1]):
        total_T1 = total_T1 + x_Tk[:, choice : choice + 1]
    return total_T1


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, kind: str) -> Tensor:
        wide_TE = logits_TE.to(accumulation_dtype(logits_TE.dtype))
        if kind == "sqrtsoftplus":
            scores_TE = softplus(wide_TE).sqrt()
        else:
            scores_TE = softmax(wide_TE) if kind == "softmax" else sigmoid(wide_TE)
        ctx.kind, ctx.dtype = kind, logits_TE.dtype
        ctx.save_for_backward(scores_TE, logits_TE if kind == "sqrtsoftplus" else None)
        return scores_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scores_TE, logits_TE = ctx.saved_tensors
        if ctx.kind == "softmax":
            grad_logits_TE = scores_TE * (grad_TE - (scores_TE * grad_TE).sum(-1, keepdim=True))
        elif ctx.kind == "sqrtsoftplus":
            grad_logits_TE = grad_TE * logits_TE.to(grad_TE.dtype).sigmoid() / (2 * scores_TE)
        else:
            grad_logits_TE = grad_TE * scores_TE * (1 - scores_TE)
        return grad_logits_TE.to(ctx.dtype), None


def compute_scores(logits_TE: Tensor, kind: str) -> Tensor:
    """The softmax of each row, or the sigmoid of each element or the root of its softplus, in float32 at least."""
    return _Scores.apply(logits_TE, kind)  # pyright: ignore[reportReturnType]


def compute_weights(
    scores_TE: Tensor, experts_Tk: Tensor, *, normalise: bool, scale: float, dtype: torch.dtype
) -> Tensor:
    """Weights of the selected experts, [T, k]; ``normalise`` scales them to a sum of 1, before ``scale``."""
    weights_Tk = scores_TE.gather(-1, experts_Tk)
    if normalise:
        weights_Tk = weights_Tk / (sum_choices(weights_Tk) + EPS)
    return (weights_Tk * scale).to(dtype)


# -- softmax top-k in one kernel -------------------------------------------------------------


def route_topk(
    logits_TE: Tensor,
    per_token: int,
    *,
    normalise: bool,
    scale: float,
    dtype: torch.dtype,
    experts_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights of each token's top-k experts, [T, k], and their indices; or of the given ``experts_Tk``."""
    options = (per_token, normalise, scale, dtype)
    return _RouteTopk.apply(logits_TE, experts_Tk, options)  # pyright: ignore[reportReturnType]


class _RouteTopk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, replayed_Tk: Tensor | None, options: tuple[int, bool, float, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        weights_Tk, experts_Tk = _launch(logits_TE, replayed_Tk, options)
        ctx.options = options
        ctx.mark_non_differentiable(experts_Tk)
        ctx.save_for_backward(logits_TE, experts_Tk)
        return weights_Tk, experts_Tk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Tk: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_TE, experts_Tk = ctx.saved_tensors
        _, normalise, scale, _ = ctx.options
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        grad_Tk = grad_Tk.float() * scale
        if normalise:
            selected_Tk = scores_TE.gather(-1, experts_Tk)
            total_T1 = selected_Tk.sum(-1, keepdim=True) + EPS
            normalized_Tk = selected_Tk / total_T1
            grad_Tk = (grad_Tk - (grad_Tk * normalized_Tk).sum(-1, keepdim=True)) / total_T1
        # A token selects an expert at most once: no sum has a conflict.
        grad_scores_TE = torch.zeros_like(scores_TE).scatter_add_(-1, experts_Tk, grad_Tk)
        grad_logits_TE = scores_TE * (grad_scores_TE - (scores_TE * grad_scores_TE).sum(-1, keepdim=True))
        return grad_logits_TE.to(logits_TE.dtype), None, None


def _launch(
    logits_TE: Tensor, replayed_Tk: Tensor | None, options: tuple[int, bool, float, torch.dtype]
) -> tuple[Tensor, Tensor]:
    (tokens, experts), (per_token, normalise, scale, dtype) = logits_TE.shape, options
    weights_Tk = torch.empty(tokens, per_token, dtype=dtype, device=logits_TE.device)
    experts_Tk = torch.empty(tokens, per_token, dtype=torch.int64, device=logits_TE.device)
    choices_Tk = experts_Tk if replayed_Tk is None else replayed_Tk.contiguous()
    if tokens:
        with device_guard(logits_TE):
            tensors = (logits_TE, choices_Tk, weights_Tk, experts_Tk, 0.0 if replayed_Tk is None else 1.0, scale, EPS)
            _route_kernel[(tokens,)](
                *tensors,
                EXPERTS=experts,
                PER_TOKEN=per_token,
                NORMALISE=normalise,
                BLOCK_E=triton.next_power_of_2(experts),
                BLOCK_K=triton.next_power_of_2(per_token),
                num_warps=1 if experts <= 256 else 4,
                **pdl_options(logits_TE.device),
            )
    return weights_Tk, experts_Tk


@jit
def _route_kernel(
    logits_ptr: tl.tensor,
    choices_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    has_choices: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """``has_choices`` is a run-time branch: given experts get the weights they would get if they were selected."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert_E, choice_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logit_E = tl.load(logits_ptr + token * EXPERTS + expert_E, expert_E < EXPERTS, other=float("-inf")).to(tl.float32)
    score_E = tl.exp(logit_E - tl.max(logit_E, 0))
    score_E = score_E / tl.sum(score_E, 0)
    weight_K, expert_K = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    remaining_E, total = logit_E, 0.0
    for choice in tl.static_range(PER_TOKEN):
        best_expert = tl.minimum(tl.argmax(remaining_E, 0), EXPERTS - 1).to(tl.int64)
        if has_choices > 0.0:
            best_expert = tl.load(choices_ptr + token * PER_TOKEN + choice).to(tl.int64)
        weight = tl.sum(tl.where(expert_E == best_expert, score_E, 0.0), 0)
        expert_K = tl.where(choice_K == choice, best_expert, expert_K)
        weight_K = tl.where(choice_K == choice, weight, weight_K)
        total += weight
        remaining_E = tl.where(expert_E == best_expert, float("-inf"), remaining_E)
    if NORMALISE:
        weight_K = weight_K / (total + eps)
    index_K = token * PER_TOKEN + choice_K
    tl.store(weights_ptr + index_K, weight_K * scale, choice_K < PER_TOKEN)
    tl.store(experts_ptr + index_K, expert_K, choice_K < PER_TOKEN)
