"""Dense causal SDPA (cuDNN, FlashAttention) for long packed sequences of equal length.

Shapes: T tokens, H query heads, G key-value heads, d channels, B sequences of S tokens.

Consecutive sequences of one length that together fill a GPU are one dense batch, for which the dense kernel is faster
than varlen; a long sequence is a batch by itself. All others are left to the varlen kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

# Consecutive sequences of one length are a dense batch if they have this many tokens in all, and each.
MIN_BATCH_TOKENS = 4096
MIN_SEQUENCE_TOKENS = 1024
_MAX_HEAD_DIM = 128
# In order of preference.
_BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]

VarlenFn = Callable[[slice, Sequence[int]], Tensor]
"""Varlen attention of the tokens of a slice, in sequences of these lengths."""


def has_dense_batch(lengths: Sequence[int], width: int) -> bool:
    """Whether any sequences form a dense batch."""
    return width <= _MAX_HEAD_DIM and any(is_dense for _, _, is_dense in group_equal_lengths(lengths))


def group_equal_lengths(lengths: Sequence[int]) -> list[tuple[int, int, bool]]:
    """Runs of consecutive equal lengths: the length, how many, and whether they are a dense batch.

    >>> group_equal_lengths([5000, 2048, 2048, 7])
    [(5000, 1, True), (2048, 2, True), (7, 1, False)]
    """
    groups = ((length, len(list(same))) for length, same in groupby(lengths))
    return [
        (length, count, length >= MIN_SEQUENCE_TOKENS and length * count >= MIN_BATCH_TOKENS)
        for length, count in groups
    ]


def dense_sdpa_attention(
    q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, lengths: Sequence[int], scale: float, varlen: VarlenFn
) -> Tensor:
    """Causal attention within each sequence; ``varlen`` computes those that are in no dense batch."""
    parts: list[Tensor] = []
    start, short = 0, list[int]()
    for length, count, is_dense in group_equal_lengths(lengths):
        if not is_dense:
            short += [length] * count
            continue
        if short:
            parts.append(varlen(slice(start, start + sum(short)), short))
            start, short = start + sum(short), []
        rows = slice(start, start + length * count)
        parts.append(_dense_batch(q_THd[rows], k_TGd[rows], v_TGd[rows], count, scale))
        start += length * count
    if short:
        parts.append(varlen(slice(start, start + sum(short)), short))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _dense_batch(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, count: int, scale: float) -> Tensor:
    q_BHSd, k_BGSd, v_BGSd = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q_THd, k_TGd, v_TGd))
    gqa = q_BHSd.shape[1] != k_BGSd.shape[1]
    with sdpa_kernel(_BACKENDS, set_priority=True):
        out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, scale=scale, enable_gqa=gqa)
    return out_BHSd.transpose(1, 2).flatten(0, 1)
