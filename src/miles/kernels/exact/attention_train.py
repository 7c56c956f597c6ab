"""A trainer's exact attention on a card, forward: tiles of each span's queries over its own keys.

Shapes: T queries, S keys, H query heads, G key-value heads, d channels of a key, e of a value, I tiles.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import on
from miles.kernels.exact.attention import Asked
from miles.kernels.exact.attention_paged import launch_tiles
from miles.kernels.exact.attention_tables import even
from miles.kernels.prefill import prefill_tiles
from miles.kernels.terms import Terms


def tiles_on(asked: Asked, device: torch.device) -> Tensor:
    """Tiles of all queries, [I, 4]: first key of the span, first query, queries, position of the first."""
    if (device, "queries") not in asked.kept:
        spans = asked.spans
        tiles_I4 = prefill_tiles(spans.keys_N - spans.count_N, spans.count_N, spans.start_N, 0)
        asked.kept[device, "queries"] = torch.from_numpy(tiles_I4).to(device, non_blocking=True)
    return asked.kept[device, "queries"]


def train_attention(
    q_THd: Tensor, k_SGd: Tensor, v_SGe: Tensor, asked: Asked, terms: Terms, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """What every query sees, [T, H, e], and the logarithm of its sum of exponentials, [T, H] in float32."""
    q_THd, k_SGd, v_SGe = even(q_THd), even(k_SGd), even(v_SGe)
    heads = q_THd.shape[1]
    out_THe = torch.empty(len(q_THd), heads, v_SGe.shape[2], dtype=q_THd.dtype, device=q_THd.device)
    lse_TH = torch.empty(len(q_THd), heads, dtype=torch.float32, device=q_THd.device)
    tiles = tiles_on(asked, q_THd.device)
    with on(q_THd):
        launch_tiles((q_THd, k_SGd, v_SGe, tiles, tiles), terms, sinks_H, out_THe, lse_TH)
    return out_THe, lse_TH
