"""A trainer's exact attention on a card, backward: nothing is added by two programs, so two runs give the same bits.

Shapes: T queries, S keys, H query heads, G key-value heads, d channels of a key, e of a value, I tiles of queries, J of
keys.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from miles.kernels.device_code import on
from miles.kernels.exact.attention import Asked
from miles.kernels.exact.attention_tables import even, keys_tile_of, numbers, queries_tile_of, told
from miles.kernels.exact.attention_train import tiles_on
from miles.kernels.prefill import TILE
from miles.kernels.terms import Terms

# Rows of a program that multiplies gradients and results.
_ROWS = 16


def _key_tiles_on(asked: Asked, size: int, device: torch.device) -> Tensor:
    """Tiles of all keys, [J, 5]: first key of the span, first query, keys, keys before the first query, first key.

    Those that are seen most come first: they take longest.
    """
    if (device, size) not in asked.kept:
        spans = asked.spans
        parts_N = -(-spans.keys_N // size)
        span_J = np.arange(len(parts_N)).repeat(parts_N)
        first_J = (np.arange(len(span_J)) - (parts_N.cumsum() - parts_N)[span_J]) * size
        past_N = spans.keys_N - spans.count_N
        columns = (spans.start_N[span_J], spans.first_N[span_J], spans.keys_N[span_J], past_N[span_J], first_J)
        tiles_J5 = np.stack(columns, 1).astype(np.int32)
        seen_J = np.minimum(spans.keys_N[span_J] - first_J, spans.count_N[span_J])
        tiles_J5 = tiles_J5[(-seen_J).argsort(kind="stable")]
        asked.kept[device, size] = torch.from_numpy(tiles_J5).to(device, non_blocking=True)
    return asked.kept[device, size]


def train_backward(
    grad_THe: Tensor, saved: tuple[Tensor, ...], asked: Asked, terms: Terms
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, and what gradient and result have in common, [T, H].

    ``saved`` are queries, keys, values, results and logarithms of sums, the results as the forward made them.
    """
    # Read by its compiler when it is first needed.
    from miles.kernels.exact.attention_backward_code import keys_backward, queries_backward, sum_products

    q_THd, k_SGd, v_SGe = (even(x) for x in saved[:3])
    out_THe, lse_TH, grad_THe = saved[3], saved[4], grad_THe.contiguous()
    made, device, heads = told(q_THd, k_SGd, v_SGe, terms, None), q_THd.device, q_THd.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q_THd, k_SGd, v_SGe))
    delta_TH = torch.empty_like(lse_TH)
    read = (q_THd, k_SGd, v_SGe, grad_THe, lse_TH, delta_TH)
    told_numbers = (q_THd.stride(0), *numbers(terms), terms.scale)
    with on(q_THd):
        rows = delta_TH.numel()
        sum_products[(-(-rows // _ROWS),)](grad_THe, out_THe, delta_TH, rows, made._replace(M=_ROWS), num_warps=4)
        tiled, tile, parts = keys_tile_of(made, q_THd.dtype)
        tiles = _key_tiles_on(asked, tiled.N, device)
        how = {"num_warps": tile.warps, "num_stages": tile.stages}
        keys_backward[(made.G, len(tiles), parts)](*read, tiles, dk, dv, *told_numbers, tiled, parts, **how)
        tiled, tile = queries_tile_of(made, q_THd.dtype)
        tiles = tiles_on(asked, device)
        how = {"num_warps": tile.warps, "num_stages": tile.stages}
        queries_backward[(heads, len(tiles), TILE // tiled.M)](*read, tiles, dq, *told_numbers, tiled, **how)
    return dq, dk, dv, delta_TH
