"""MoE top-k router: softmax, top-k selection and weights.

Shapes: T tokens, E experts, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import (
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
    use_triton_inference,
)

# Keeps the weights of experts with zero probability from becoming 0 / 0.
_EPS = 1e-20


def route_topk(
    logits_TE: Tensor, per_token: int, *, normalise: bool, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Weights of each token's top-k experts, [T, k] in ``dtype``, and their indices (int64), highest first.

    Weights are a float32 softmax over all experts, ``normalise``d to a sum of 1 if asked, times ``scale``.
    """
    if use_triton_inference(logits_TE):
        tokens, experts = logits_TE.shape
        assert logits_TE.stride(1) == 1
        weights_Tk = torch.empty(tokens, per_token, dtype=dtype, device=logits_TE.device)
        experts_Tk = torch.empty(tokens, per_token, dtype=torch.int64, device=logits_TE.device)
        tensors = (logits_TE, weights_Tk, experts_Tk)
        scalars = (logits_TE.stride(0), scale, _EPS)
        _route_kernel[(tokens,)](
            *tensors,
            *scalars,
            EXPERTS=experts,
            PER_TOKEN=per_token,
            NORMALISE=normalise,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(per_token),
            num_warps=1 if experts <= 256 else 4,
            **pdl_options(logits_TE.device),
        )
        return weights_Tk, experts_Tk
    experts_Tk = logits_TE.topk(per_token, dim=-1).indices
    scores_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    weights_Tk = scores_TE.gather(-1, experts_Tk)
    if normalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _EPS)
    return (weights_Tk * scale).to(dtype), experts_Tk


@jit
def _route_kernel(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert_E, choice_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logit_E = tl.load(logits_ptr + token * stride + expert_E, expert_E < EXPERTS, other=float("-inf")).to(tl.float32)
    max_logit = tl.max(logit_E, 0)
    total = tl.sum(tl.exp(logit_E - max_logit), 0)
    best_K, expert_K = tl.full((BLOCK_K,), float("-inf"), tl.float32), tl.zeros((BLOCK_K,), tl.int32)
    for choice in tl.static_range(PER_TOKEN):
        # Ties go to the first. If no logit is a number, the index may be out of range.
        best, index = tl.max(logit_E, 0, return_indices=True, return_indices_tie_break_left=True)
        expert = tl.minimum(index, EXPERTS - 1)
        best_K = tl.where(choice_K == choice, best, best_K)
        expert_K = tl.where(choice_K == choice, expert, expert_K)
        logit_E = tl.where(expert_E == expert, float("-inf"), logit_E)
    weight_K = tl.exp(best_K - max_logit) / total
    if NORMALISE:
        weight_K = weight_K / (tl.sum(weight_K, 0) + eps)
    index_K = token * PER_TOKEN + choice_K
    tl.store(weights_ptr + index_K, weight_K * scale, choice_K < PER_TOKEN)
    tl.store(experts_ptr + index_K, expert_K, choice_K < PER_TOKEN)
