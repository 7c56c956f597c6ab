"""A router's shares, choices and weights, of each token for itself: one form for both planes.

Shapes: T tokens, E experts, k experts a token. Shares are float32 at least; of experts that are alike the first is
chosen; a token's weights are added up in the order of its choices.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.device_code import HAVE_TRITON, early, gdc_launch_dependents, gdc_wait, jit, on, tl, triton
from miles.kernels.exact.elements import sigmoid, softmax, wide_of

# Keeps the weights of experts that the router would never choose from becoming 0 / 0.
TINY = 1e-20


def on_card(logits_TE: Tensor) -> bool:
    """Whether device code routes here."""
    return logits_TE.is_cuda and HAVE_TRITON and logits_TE.dtype != torch.float64


def best(scores_TE: Tensor, count: int) -> Tensor:
    """The ``count`` highest of each row, highest first; of those alike the first."""
    return scores_TE.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def in_turn(x_Tk: Tensor) -> Tensor:
    """The sum over a token's choices, [T, 1], one after the other."""
    total_T1 = x_Tk[:, :1]
    for choice in range(1, x_Tk.shape[1]):
        total_T1 = total_T1 + x_Tk[:, choice : choice + 1]
    return total_T1


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, kind: str) -> Tensor:
        wide_TE = logits_TE.to(wide_of(logits_TE.dtype))
        scores_TE = softmax(wide_TE) if kind == "softmax" else sigmoid(wide_TE)
        ctx.kind, ctx.dtype = kind, logits_TE.dtype
        ctx.save_for_backward(scores_TE)
        return scores_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (scores_TE,) = ctx.saved_tensors
        if ctx.kind == "softmax":
            back_TE = scores_TE * (grad_TE - (scores_TE * grad_TE).sum(-1, keepdim=True))
        else:
            back_TE = grad_TE * scores_TE * (1 - scores_TE)
        return back_TE.to(ctx.dtype), None


def scores_of(logits_TE: Tensor, kind: str) -> Tensor:
    """The softmax of each row, or the sigmoid of each element, in float32 at least."""
    return _Scored.apply(logits_TE, kind)  # pyright: ignore[reportReturnType]


def weights_of(scores_TE: Tensor, experts_Tk: Tensor, *, normalise: bool, scale: float, dtype: torch.dtype) -> Tensor:
    """What the chosen experts weigh, [T, k]; ``normalise`` makes them add up to 1, before ``scale``."""
    weights_Tk = scores_TE.gather(-1, experts_Tk)
    if normalise:
        weights_Tk = weights_Tk / (in_turn(weights_Tk) + TINY)
    return (weights_Tk * scale).to(dtype)


# -- the likeliest of a softmax, in one launch -------------------------------------------------


def route(
    logits_TE: Tensor,
    per_token: int,
    *,
    normalise: bool,
    scale: float,
    dtype: torch.dtype,
    experts_Tk: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The weights of each token's likeliest experts, [T, k], and which they are; or of those that are given."""
    how = (per_token, normalise, scale, dtype)
    return _Route.apply(logits_TE, experts_Tk, how)  # pyright: ignore[reportReturnType]


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, given_Tk: Tensor | None, how: tuple[int, bool, float, torch.dtype]
    ) -> tuple[Tensor, Tensor]:
        logits_TE = logits_TE.contiguous()
        weights_Tk, experts_Tk = _launch(logits_TE, given_Tk, how)
        ctx.how = how
        ctx.mark_non_differentiable(experts_Tk)
        ctx.save_for_backward(logits_TE, experts_Tk)
        return weights_Tk, experts_Tk

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_Tk: Tensor, _: Tensor | None) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits_TE, experts_Tk = ctx.saved_tensors
        _, normalise, scale, _ = ctx.how
        scores_TE = logits_TE.softmax(-1, dtype=torch.float32)
        grad_Tk = grad_Tk.float() * scale
        if normalise:
            chosen_Tk = scores_TE.gather(-1, experts_Tk)
            total_T1 = chosen_Tk.sum(-1, keepdim=True) + TINY
            shares_Tk = chosen_Tk / total_T1
            grad_Tk = (grad_Tk - (grad_Tk * shares_Tk).sum(-1, keepdim=True)) / total_T1
        # A token has an expert once: nothing meets in these sums.
        slope_TE = torch.zeros_like(scores_TE).scatter_add_(-1, experts_Tk, grad_Tk)
        back_TE = scores_TE * (slope_TE - (scores_TE * slope_TE).sum(-1, keepdim=True))
        return back_TE.to(logits_TE.dtype), None, None


def _launch(
    logits_TE: Tensor, given_Tk: Tensor | None, how: tuple[int, bool, float, torch.dtype]
) -> tuple[Tensor, Tensor]:
    (tokens, experts), (per_token, normalise, scale, dtype) = logits_TE.shape, how
    weights_Tk = torch.empty(tokens, per_token, dtype=dtype, device=logits_TE.device)
    experts_Tk = torch.empty(tokens, per_token, dtype=torch.int64, device=logits_TE.device)
    told_Tk = experts_Tk if given_Tk is None else given_Tk.contiguous()
    if tokens:
        with on(logits_TE):
            _route_tokens[(tokens,)](
                *(logits_TE, told_Tk, weights_Tk, experts_Tk, 0.0 if given_Tk is None else 1.0, scale, TINY),
                EXPERTS=experts,
                PER_TOKEN=per_token,
                NORMALISE=normalise,
                BLOCK_E=triton.next_power_of_2(experts),
                BLOCK_K=triton.next_power_of_2(per_token),
                num_warps=1 if experts <= 256 else 4,
                **early(logits_TE.device),
            )
    return weights_Tk, experts_Tk


@jit
def _route_tokens(
    logits_ptr: tl.tensor,
    told_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    told: tl.tensor,
    scale: tl.tensor,
    tiny: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Whether experts are ``told`` is asked while it runs: those that are weigh what they would if they were chosen."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert_E, choice_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logit_E = tl.load(logits_ptr + token * EXPERTS + expert_E, expert_E < EXPERTS, other=float("-inf")).to(tl.float32)
    score_E = tl.exp(logit_E - tl.max(logit_E, 0))
    score_E = score_E / tl.sum(score_E, 0)
    weight_K, best_K = tl.zeros((BLOCK_K,), tl.float32), tl.zeros((BLOCK_K,), tl.int64)
    left_E, total = logit_E, 0.0
    for choice in tl.static_range(PER_TOKEN):
        best = tl.minimum(tl.argmax(left_E, 0), EXPERTS - 1).to(tl.int64)
        if told > 0.0:
            best = tl.load(told_ptr + token * PER_TOKEN + choice).to(tl.int64)
        weight = tl.sum(tl.where(expert_E == best, score_E, 0.0), 0)
        best_K = tl.where(choice_K == choice, best, best_K)
        weight_K = tl.where(choice_K == choice, weight, weight_K)
        total += weight
        left_E = tl.where(expert_E == best, float("-inf"), left_E)
    if NORMALISE:
        weight_K = weight_K / (total + tiny)
    place_K = token * PER_TOKEN + choice_K
    tl.store(weights_ptr + place_K, weight_K * scale, choice_K < PER_TOKEN)
    tl.store(experts_ptr + place_K, best_K, choice_K < PER_TOKEN)
