"""Reference paged attention in plain torch, which the Triton kernels are tested against.

Shapes: T queries, C tokens of context, H query heads, G key-value heads, d channels of a key, e of a value, S slots of
the KV cache, P pages of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.runtime.kv_cache import KVScales
from miles.precision.kv_cache import dequantize_kv


def paged_attention_reference(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_P: Tensor,
    position_T: Tensor,
    params: PagedAttentionParams,
    *,
    visible_ends_T: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence's queries at these positions over its pages: causal, or before ``visible_ends_T``."""
    wide, page_size = torch.promote_types(q_THd.dtype, torch.float32), params.page_size
    ends_T = position_T + 1 if visible_ends_T is None else visible_ends_T
    token_C = torch.arange(int(ends_T.max()), device=q_THd.device)
    slot_C = pages_P[token_C // page_size].long() * page_size + token_C % page_size
    queries_per_kv = q_THd.shape[1] // k_SGd.shape[1]
    k_CGd, v_CGe = k_SGd[slot_C], v_SGe[slot_C]
    if params.kv_scales is not None:
        parts = (v_SGe.shape[2], k_SGd.shape[2] - v_SGe.shape[2]) if _has_rope_scale(k_SGd, params.kv_scales) else ()
        k_CGd = _dequantize(k_CGd, params.kv_scales.keys_PGp, slot_C, wide, parts or (k_SGd.shape[2],))
        v_CGe = _dequantize(v_CGe, params.kv_scales.values_PGp, slot_C, wide, (v_SGe.shape[2],))
    k_CHd, v_CHe = (x.to(wide).repeat_interleave(queries_per_kv, 1) for x in (k_CGd, v_CGe))
    score_HTC = torch.einsum("thd,chd->htc", q_THd.to(wide), k_CHd) * params.scale
    if params.softcap is not None:
        score_HTC = params.softcap * torch.tanh(score_HTC / params.softcap)
    position_T1 = position_T[:, None]
    visible_TC = token_C < ends_T[:, None]
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


def _has_rope_scale(k_SGd: Tensor, scales: KVScales) -> bool:
    """Whether keys have two scales, of their latent and of their RoPE channels (MLA)."""
    return scales.keys_PGp.shape[1] == 2 * k_SGd.shape[1]


def _dequantize(
    codes_CGd: Tensor, scales_PGp: Tensor, slot_C: Tensor, wide: torch.dtype, parts: tuple[int, ...]
) -> Tensor:
    """Keys or values of an FP8 cache in these slots; each of the ``parts`` of the channels has its scales."""
    page_size, groups = scales_PGp.shape[2], codes_CGd.shape[1]
    scale_CG = scales_PGp[slot_C // page_size, :, slot_C % page_size]
    data = codes_CGd.contiguous().view(torch.float8_e4m3fn).float().split(parts, -1)
    return torch.cat([dequantize_kv(x, s, wide) for x, s in zip(data, scale_CG.split(groups, 1), strict=False)], -1)
