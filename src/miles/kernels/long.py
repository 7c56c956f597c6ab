"""Causal attention of long sequences, one after the other, by the library's kernel for whole sequences.

Shapes: T tokens, H query heads, G key-value heads, d channels, B sequences of S tokens.

Sequences of one length that together fill a card are one batch of the kernel for whole sequences, which is then the
faster one; a long sequence does so by itself. What lies between is left to whoever packs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG, SHORT = 4096, 1024
"""So many tokens of neighbours of one length are a batch, if each has at least the second."""
_WIDTH = 128
# Where the first is not built in, the next does it.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

Packed = Callable[[slice, Sequence[int]], Tensor]
"""Attention of the tokens of a slice, sequences of these lengths."""


def has_long(lengths: Sequence[int], width: int) -> bool:
    """Whether any sequence is better read by itself."""
    return width <= _WIDTH and any(batched for _, _, batched in runs(lengths))


def runs(lengths: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Neighbours of one length: the length, how many, and whether they are a batch.

    >>> runs([5000, 2048, 2048, 7])
    [(5000, 1, True), (2048, 2, True), (7, 1, False)]
    """
    found = ((length, len(list(same))) for length, same in groupby(lengths))
    return [(length, count, length >= SHORT and length * count >= LONG) for length, count in found]


def long_attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, lengths: Sequence[int], scale: float, packed: Packed
) -> Tensor:
    """Causal attention within each sequence; ``packed`` does it for those that are not long."""
    parts: list[Tensor] = []
    start, short = 0, list[int]()
    for length, count, batched in runs(lengths):
        if not batched:
            short += [length] * count
            continue
        if short:
            parts.append(packed(slice(start, start + sum(short)), short))
            start, short = start + sum(short), []
        at = slice(start, start + length * count)
        parts.append(_whole(q_THd[at], k_TGd[at], v_TGd[at], count, scale))
        start += length * count
    if short:
        parts.append(packed(slice(start, start + sum(short)), short))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _whole(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, count: int, scale: float) -> Tensor:
    q_BHSd, k_BGSd, v_BGSd = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
    gqa = q_BHSd.shape[1] != k_BGSd.shape[1]
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, scale=scale, enable_gqa=gqa)
    return out_BHSd.transpose(1, 2).flatten(0, 1)
