"""Reference paged attention in plain torch, which the Triton kernels are tested against.

Shapes: T queries, C tokens of context, H query heads, G key-value heads, d channels of a key, e of a value, S slots of
the KV cache, P pages of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams


def paged_attention_reference(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, pages_P: Tensor, position_T: Tensor, params: PagedAttentionParams
) -> Tensor:
    """Causal attention of one sequence's queries at these positions over its pages."""
    wide, page_size = torch.promote_types(q_THd.dtype, torch.float32), params.page_size
    token_C = torch.arange(int(position_T.max()) + 1, device=q_THd.device)
    slot_C = pages_P[token_C // page_size].long() * page_size + token_C % page_size
    queries_per_kv = q_THd.shape[1] // k_SGd.shape[1]
    k_CHd, v_CHe = (x[slot_C].to(wide).repeat_interleave(queries_per_kv, 1) for x in (k_SGd, v_SGe))
    score_HTC = torch.einsum("thd,chd->htc", q_THd.to(wide), k_CHd) * params.scale
    if params.softcap is not None:
        score_HTC = params.softcap * torch.tanh(score_HTC / params.softcap)
    position_T1 = position_T[:, None]
    visible_TC = token_C <= position_T1
    if params.window is not None:
        visible_TC = visible_TC & (token_C > position_T1 - params.window)
    if params.chunk is not None:
        visible_TC = visible_TC & (token_C // params.chunk == position_T1 // params.chunk)
    score_HTC = score_HTC.masked_fill(~visible_TC, -torch.inf)
    lse_HT = score_HTC.logsumexp(-1)
    if params.sinks_H is not None:
        lse_HT = torch.logaddexp(lse_HT, params.sinks_H.to(wide)[:, None])
    out_THe = torch.einsum("htc,che->the", (score_HTC - lse_HT[..., None]).exp(), v_CHe)
    return out_THe.to(q_THd.dtype)
