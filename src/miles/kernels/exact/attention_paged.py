"""Exact attention over pages on a card: rows with one new token each, and tiles of several.

Shapes: B rows, T new tokens, H query heads, G key-value heads, d channels of a key, e of a value, S slots of the cache,
seats of P pages each, I tiles.

Grids never change and what there is to do is read on the device, so that launches of single tokens can be captured in a
graph and replayed for any lengths. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import early
from miles.kernels.exact.attention_tables import items_of, numbers, tile_of, told
from miles.kernels.exact.attention_work import ChunkWork
from miles.kernels.prefill import TILE
from miles.kernels.terms import Terms
from miles.kernels.tiling import power

# The most queries of a tile.
_MOST = 64


def decode_attention(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    seats_B: Tensor,
    work: ChunkWork,
    terms: Terms,
    *,
    page_size: int,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    has_trunks: bool | None = None,
) -> Tensor:
    """What the new token of every row sees, [B, H, e]; zeros for rows of length 0.

    ``work`` was filled in and sent; its lengths count the new tokens, whose keys and values are in their pages.
    ``has_trunks``: whether trunks are launched at all (default: whether the work last filled in has any).
    """
    # Read by its compiler when it is first needed.
    from miles.kernels.exact.attention_items import attend_items, join_parts

    made = told(q_BHd, k_SGd, v_SGe, terms, sinks_H, page_size=page_size)
    rows, heads = q_BHd.shape[:2]
    assert len(seats_B) == rows <= work.max_rows, "as many rows as seats, no more than the work was made for"
    if out is None:
        out = torch.empty((rows, heads, made.e), device=q_BHd.device, dtype=q_BHd.dtype)
    assert out.is_contiguous(), "results are written row after row"
    parts = work.parts(heads, made.e)
    filled = (work.counts, work.length_B, work.base_B, work.items_I)
    written = (*parts, out, q_BHd if sinks_H is None else sinks_H)
    strides, started = (q_BHd.stride(0), pages_SP.stride(0)), early(q_BHd.device)

    def launch(queries: int, share: int, trunk: bool) -> None:
        tiled, tuned = items_of(made, q_BHd.dtype, queries, share)
        read = (q_BHd, k_SGd, v_SGe, pages_SP, seats_B, *filled, *written, *strides, *numbers(terms))
        how = {"num_warps": tuned.warps, "num_stages": tuned.stages, "maxnreg": tuned.registers, **started}
        attend_items[(work.sms * tuned.resident,)](*read, tiled, trunk, **how)

    if work.has_trunks if has_trunks is None else has_trunks:
        launch(work.trunk_queries, made.r, True)
    queries = min(power(made.r), _MOST)
    launch(queries, min(made.r, queries), False)
    join_parts[(rows, heads)](work.base_B, *parts, written[3], out, made, num_warps=1, **started)
    return out


def prefill_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    tiles: Tensor,
    terms: Terms,
    *,
    page_size: int,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What every new token sees of its sequence, [T, H, e]; rows of ``out`` that are in no tile stay as they were.

    ``tiles`` is what ``prefill_tiles`` made, on the device; keys and values of the new tokens are in their pages.
    """
    made = told(q_THd, k_SGd, v_SGe, terms, sinks_H, page_size=page_size)
    if out is None:
        out = torch.empty((*q_THd.shape[:2], made.e), device=q_THd.device, dtype=q_THd.dtype)
    assert out.is_contiguous(), "results are written row after row"
    launch_tiles((q_THd, k_SGd, v_SGe, pages_SP, tiles), terms, sinks_H, out, None, page_size=page_size)
    return out


def launch_tiles(
    read: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    terms: Terms,
    sinks_H: Tensor | None,
    out_THe: Tensor,
    lse_TH: Tensor | None,
    *,
    page_size: int = 0,
) -> None:
    """A program for every head of every tile, and every part of its values' channels."""
    from miles.kernels.exact.attention_tiles import attend_tiles

    q_THd, pages_SP, tiles = read[0], read[3], read[4]
    made = told(q_THd, read[1], read[2], terms, sinks_H, page_size=page_size)
    tiled, tile, parts = tile_of(made, q_THd.dtype)
    if len(tiles):
        # Heads are neighbours: those of one key-value head find its keys in the cache of the card.
        attend_tiles[(q_THd.shape[1], len(tiles), TILE // tile.queries * parts)](
            *read,
            *(out_THe, out_THe if lse_TH is None else lse_TH, q_THd if sinks_H is None else sinks_H),
            *(q_THd.stride(0), pages_SP.stride(0) if page_size else 0, *numbers(terms)),
            *(tiled, parts, lse_TH is not None),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
