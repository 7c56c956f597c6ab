"""Attention of one sequence over its pages in plain torch: what the device code is held against.

Shapes: T tokens that ask, C tokens of context, H query heads, G key-value heads, r = H / G, d channels of a key, e of a
value, S slots of the cache, P pages of the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.tiling import Look


def over_pages(q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, pages_P: Tensor, position_T: Tensor, look: Look) -> Tensor:
    """Tokens at these positions see themselves and what came before, as far as ``look`` lets them."""
    wide = torch.promote_types(q_THd.dtype, torch.float32)
    token_C = torch.arange(int(position_T.max()) + 1, device=q_THd.device)
    slot_C = pages_P[token_C // look.page_size].long() * look.page_size + token_C % look.page_size
    share = q_THd.shape[1] // k_SGd.shape[1]
    k_CHd, v_CHe = (x[slot_C].to(wide).repeat_interleave(share, 1) for x in (k_SGd, v_SGe))
    score_HTC = torch.einsum("thd,chd->htc", q_THd.to(wide), k_CHd) * look.scale
    if look.softcap is not None:
        score_HTC = look.softcap * torch.tanh(score_HTC / look.softcap)
    position_T1 = position_T[:, None]
    seen_TC = token_C <= position_T1
    if look.window is not None:
        seen_TC = seen_TC & (token_C > position_T1 - look.window)
    if look.chunk is not None:
        seen_TC = seen_TC & (token_C // look.chunk == position_T1 // look.chunk)
    score_HTC = score_HTC.masked_fill(~seen_TC, -torch.inf)
    total_HT = score_HTC.logsumexp(-1)
    if look.sinks_H is not None:
        total_HT = torch.logaddexp(total_HT, look.sinks_H.to(wide)[:, None])
    out_THe = torch.einsum("htc,che->the", (score_HTC - total_HT[..., None]).exp(), v_CHe)
    return out_THe.to(q_THd.dtype)
