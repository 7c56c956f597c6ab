"""One token a row from its logits, with the log-prob that a trainer will find for it.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels import draw as drawing
from miles.kernels.exact.elements import each
from miles.kernels.exact.head import CHUNK, chunks_of, joined, logp_of
from miles.kernels.exact.product_code import on_card


def draw(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    *,
    top_k_B: Tensor,
    top_p_B: Tensor,
    min_p_B: Tensor,
    filters: bool,
    tokens_out_B: Tensor,
    logprobs_out_B: Tensor,
) -> None:
    """As ``kernels.draw.draw``; a row's token, too, is the same whatever rows are beside it."""
    if len(logits_BV) == 0:
        return
    limits = (top_k_B, top_p_B, min_p_B) if filters else None
    chunks = chunks_of(logits_BV, temperature_B)
    lse_B, _ = joined(chunks)
    if on_card(logits_BV):
        assert drawing.CHUNK == CHUNK
        known = (chunks.tops_RC, chunks.sums_RC)
        drawing.launch(logits_BV, temperature_B, uniform_B, limits, tokens_out_B, logprobs_out_B, known)
    else:
        tokens_out_B.copy_(_chosen(logits_BV, temperature_B, uniform_B, limits, lse_B))
    logp_of(logits_BV, tokens_out_B, temperature_B, lse_B, logprobs_out_B)


def _chosen(
    logits_BV: Tensor,
    temperature_B: Tensor,
    uniform_B: Tensor,
    limits: tuple[Tensor, Tensor, Tensor] | None,
    lse_B: Tensor,
) -> Tensor:
    """Tokens in plain torch, whose running sums and sorts are of each row for itself."""
    heat_B1 = temperature_B[:, None]
    probs_BV = each(torch.exp, logits_BV / torch.where(heat_B1 == 0, 1, heat_B1) - lse_B[:, None])
    kept_BV = probs_BV if limits is None else drawing.filtered(probs_BV, *limits)
    return torch.where(heat_B1 == 0, logits_BV.argmax(-1, keepdim=True), drawing.invert(kept_BV, uniform_B)).squeeze(1)
