"""Causal attention over pages with several new tokens a sequence: device code, and its plain reference.

Shapes: T new tokens, H query heads, G key-value heads, d channels of a key, e of a value, S slots of the cache, B
sequences, I tiles of their new tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.cache import Ints
from miles.kernels.plain import over_pages
from miles.kernels.tiling import How, Look, how, prefill_tile

# New tokens of a tile; a kernel may cut it further.
TILE = 128


def prefill_tiles(starts_B: Ints, counts_B: Ints, seats_B: Ints, first_row: int) -> NDArray[np.int32]:
    """Tiles of new tokens, [I, 4]: seat, first row of the queries, how many, position of the first.

    Sequence b has ``starts_B[b]`` tokens in its pages and brings ``counts_B[b]`` more; those of the first sequence
    begin at row ``first_row`` of the queries. Tiles that see most come first: they take longest.
    """
    parts_B = -(-counts_B // TILE)
    owner_I = np.arange(len(counts_B)).repeat(parts_B)
    offset_I = TILE * (np.arange(len(owner_I)) - (np.cumsum(parts_B) - parts_B)[owner_I])
    first_B = first_row + np.cumsum(counts_B) - counts_B
    count_I = np.minimum(counts_B[owner_I] - offset_I, TILE)
    position_I = starts_B[owner_I] + offset_I
    tiles_I4 = np.stack((seats_B[owner_I], first_B[owner_I] + offset_I, count_I, position_I), 1).astype(np.int32)
    return tiles_I4[(-(position_I + count_I)).argsort(kind="stable")]


def prefill_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    tiles: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What every new token sees of its sequence, [T, H, e]; rows of ``out`` that are in no tile stay as they were.

    ``tiles`` is what ``prefill_tiles`` made, on the device; keys and values of the new tokens are in their pages.
    """
    look = Look(page_size, scale, window, chunk, softcap, sinks_H)
    compiled = how(q_THd, k_SGd, v_SGe, look)
    return attend_new((q_THd, k_SGd, v_SGe, pages_SP, tiles), look, compiled, out)


def attend_new(
    read: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], look: Look, compiled: How, out: Tensor | None
) -> Tensor:
    """Launch a program for every head of every tile."""
    # Read by its compiler when it is first needed.
    from miles.kernels.prefill_code import attend_tiles

    q_THd, tiles = read[0], read[4]
    rows, heads = q_THd.shape[:2]
    if out is None:
        out = torch.empty((rows, heads, compiled.e), device=q_THd.device, dtype=q_THd.dtype)
    assert out.is_contiguous(), "results are written row after row"
    sinks_H = q_THd if look.sinks_H is None else look.sinks_H
    numbers = (q_THd.stride(0), read[3].stride(0), look.scale, look.softcap or 0.0)
    queries, tuning = prefill_tile(compiled, q_THd.dtype)
    tiled = compiled._replace(M=queries, N=tuning.tokens)
    if len(tiles):
        # Heads are neighbours: those of one key-value head find its keys in the cache of the card.
        attend_tiles[(heads, len(tiles), TILE // queries)](
            *read, out, sinks_H, *numbers, tiled, num_warps=tuning.warps, num_stages=tuning.stages
        )
    return out


def prefill_reference(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    tiles: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The same, tile after tile, with sums in float32."""
    look = Look(page_size, scale, window, chunk, softcap, sinks_H)
    if out is None:
        out = torch.empty((*q_THd.shape[:2], v_SGe.shape[2]), device=q_THd.device, dtype=q_THd.dtype)
    for seat, row, count, position in tiles.tolist():
        position_T = torch.arange(position, position + count, device=q_THd.device)
        q_tHd, pages_P = q_THd[row : row + count], pages_SP[seat]
        out[row : row + count] = over_pages(q_tHd, k_SGd, v_SGe, pages_P, position_T, look)
    return out
