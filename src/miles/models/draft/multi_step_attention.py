"""Multi-step attention in draft training ("training-time test" of EAGLE-3): every position drafts several tokens.

When a draft runs, step j of the token at position p attends to the keys of step 0 up to p, which come from the policy's
features, and to its own keys of steps 1 to j. Here all positions of packed sequences do that at once: a causal part
over the keys of step 0, and one key of its own for each later step.

Shapes: T tokens, H query heads, G key-value heads, q = H / G, d channels of a key, e of a value, C queries of a chunk,
K keys, J later steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles.core.errors import UsageError
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams, RecurrentState

# Scores of all heads at a time; backward computes them again.
_CHUNK_SCORES = 1 << 26


class MultiStepAttention:
    """An AttentionBackend for the steps of a draft on packed sequences of ``lengths``.

    The first call of a layer is ordinary causal attention by ``backend``; further calls are further steps.
    """

    latent = False

    def __init__(self, backend: AttentionBackend, lengths: Sequence[int]) -> None:
        self._backend = backend
        self._lengths = tuple(lengths)
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def __call__(self, layer: int, inputs: AttentionInputs, /) -> Tensor:
        steps = self._steps.setdefault(layer, [])
        steps.append((inputs.k_TGd, inputs.v_TGe))
        if len(steps) == 1:
            return self._backend(layer, inputs)
        if inputs.indexer is not None or inputs.params.chunk is not None:
            raise UsageError(
                "a draft with sparse or chunked attention is trained one step deep: --draft-train-steps 1."
            )
        own_k_TJGd = torch.stack([k for k, _ in steps[1:]], 1)
        own_v_TJGe = torch.stack([v for _, v in steps[1:]], 1)
        out: list[Tensor] = []
        start = 0
        for length in self._lengths:
            rows = slice(start, start + length)
            past = (steps[0][0][rows], steps[0][1][rows])
            sinks_H = inputs.sinks_H
            chunk = max(1, _CHUNK_SCORES // (max(length, 1) * inputs.q_THd.shape[1]))
            for first in range(0, length, chunk):
                last = min(first + chunk, length)
                part = slice(start + first, start + last)
                own = (own_k_TJGd[part], own_v_TJGe[part])
                args = (inputs.q_THd[part], past[0][:last], past[1][:last], *own, sinks_H)
                out.append(checkpoint(self._attend, *args, first, inputs.params, use_reentrant=False))
            start += length
        return torch.cat(out) if out else inputs.q_THd.new_empty((0, inputs.q_THd.shape[1], own_v_TJGe.shape[-1]))

    def recurrent_state(self, layer: int) -> RecurrentState:
        raise AssertionError("a draft has no recurrent layers")

    @staticmethod
    def _attend(
        q_CHd: Tensor,
        k_KGd: Tensor,
        v_KGe: Tensor,
        own_k_CJGd: Tensor,
        own_v_CJGe: Tensor,
        sinks_H: Tensor | None,
        first: int,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from the queries at rows ``first`` on, with statistics in float32."""
        wide = torch.promote_types(q_CHd.dtype, torch.float32)
        groups, steps = k_KGd.shape[1], own_k_CJGd.shape[1]
        q_CGqd = q_CHd.to(wide).unflatten(1, (groups, -1)) * params.scale
        past_CGqK = torch.einsum("cgqd,kgd->cgqk", q_CGqd, k_KGd.to(wide))
        own_CGqJ = torch.einsum("cgqd,cjgd->cgqj", q_CGqd, own_k_CJGd.to(wide))
        scores = torch.cat((past_CGqK, own_CGqJ), -1)
        if params.softcap is not None:
            scores = (scores / params.softcap).tanh() * params.softcap
        row_C1 = torch.arange(first, first + len(q_CHd), device=q_CHd.device).unsqueeze(1)
        key_K = torch.arange(len(k_KGd), device=q_CHd.device)
        hidden_CK = key_K > row_C1
        if params.window is not None:
            hidden_CK = hidden_CK | (row_C1 + steps - key_K >= params.window)
        mask = torch.cat((hidden_CK, hidden_CK.new_zeros(len(q_CHd), steps)), 1)
        scores = scores.masked_fill(mask[:, None, None], float("-inf"))
        if sinks_H is not None:
            sinks = sinks_H.to(wide).view(1, groups, -1, 1).expand(len(q_CHd), -1, -1, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)
        past_CGqe = torch.einsum("cgqk,kge->cgqe", weights[..., : len(k_KGd)], v_KGe.to(wide))
        own = weights[..., len(k_KGd) : len(k_KGd) + steps]
        out_CGqe = past_CGqe + torch.einsum("cgqj,cjge->cgqe", own, own_v_CJGe.to(wide))
        return out_CGqe.flatten(1, 2).to(q_CHd.dtype)
