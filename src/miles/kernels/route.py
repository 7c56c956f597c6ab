"""Which experts a token goes to, and with what weights.

Shapes: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import early, gdc_launch_dependents, gdc_wait, jit, ready, tl, triton

# Keeps the weights of experts that the router would never choose from becoming 0 / 0.
_TINY = 1e-20


def route(
    logits_TE: Tensor, per_token: int, *, normalise: bool, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The weights of each token's likeliest experts, [T, k] in ``dtype``, and which they are (int64), likeliest first.

    Weights are a softmax in float32 over all experts, then ``normalise`` to add up to 1, then times ``scale``.
    """
    if ready(logits_TE):
        tokens, experts = logits_TE.shape
        assert logits_TE.stride(1) == 1
        weights_Tk = torch.empty(tokens, per_token, dtype=dtype, device=logits_TE.device)
        experts_Tk = torch.empty(tokens, per_token, dtype=torch.int64, device=logits_TE.device)
        _route_token[(tokens,)](
            *(logits_TE, weights_Tk, experts_Tk, logits_TE.stride(0), scale, _TINY),
            EXPERTS=experts,
            PER_TOKEN=per_token,
            NORMALISE=normalise,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_K=triton.next_power_of_2(per_token),
            num_warps=1 if experts <= 256 else 4,
            **early(logits_TE.device),
        )
        return weights_Tk, experts_Tk
    experts_Tk = logits_TE.topk(per_token, dim=-1).indices
    scores_TE = logits_TE.softmax(-1, dtype=torch.promote_types(logits_TE.dtype, torch.float32))
    weights_Tk = scores_TE.gather(-1, experts_Tk)
    if normalise:
        weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + _TINY)
    return (weights_Tk * scale).to(dtype), experts_Tk


@jit
def _route_token(
    logits_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    experts_ptr: tl.tensor,
    stride: tl.tensor,
    scale: tl.tensor,
    tiny: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    expert_E, choice_K = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    logit_E = tl.load(logits_ptr + token * stride + expert_E, expert_E < EXPERTS, other=float("-inf")).to(tl.float32)
    top = tl.max(logit_E, 0)
    total = tl.sum(tl.exp(logit_E - top), 0)
    best_K, chosen_K = tl.full((BLOCK_K,), float("-inf"), tl.float32), tl.zeros((BLOCK_K,), tl.int32)
    for choice in tl.static_range(PER_TOKEN):
        # Of equal logits the first. Where none is a number, its place may be past the last.
        best, place = tl.max(logit_E, 0, return_indices=True, return_indices_tie_break_left=True)
        chosen = tl.minimum(place, EXPERTS - 1)
        best_K = tl.where(choice_K == choice, best, best_K)
        chosen_K = tl.where(choice_K == choice, chosen, chosen_K)
        logit_E = tl.where(expert_E == chosen, float("-inf"), logit_E)
    weight_K = tl.exp(best_K - top) / total
    if NORMALISE:
        weight_K = weight_K / (tl.sum(weight_K, 0) + tiny)
    place_K = token * PER_TOKEN + choice_K
    tl.store(weights_ptr + place_K, weight_K * scale, choice_K < PER_TOKEN)
    tl.store(experts_ptr + place_K, chosen_K, choice_K < PER_TOKEN)
