"""Attention over pages with one new token a row: device code for many rows, a few, or one, and its plain reference.

Shapes: B rows, H query heads, G key-value heads, r = H / G, d channels of a key, e of a value, S slots of the cache,
seats of P pages each.

The rows' pasts are cut into items (``work``): one launch reads the trunks, one the leaves, and one joins the partial
results of rows that have several. Their grids never change and the items are read on the device, so the launches can
be captured in a graph and replayed for any lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import early
from miles.kernels.plain import over_pages
from miles.kernels.tiling import JOINED, JOINED_CHANNELS, How, Look, decode_table, how, power
from miles.kernels.work import DecodeWork


def decode_attention(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    seats_B: Tensor,
    work: DecodeWork,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    out: Tensor | None = None,
    has_trunks: bool | None = None,
) -> Tensor:
    """What the new token of every row sees, [B, H, e]; zeros for rows of length 0.

    ``work`` was filled in and sent; its lengths count the new tokens, whose keys and values are in their pages. A row
    sees tokens after ``length - 1 - window``, and those of its own ``chunk`` of positions. ``pages_SP`` is int32.
    ``has_trunks``: whether trunks are launched at all (default: whether the work last filled in has any).
    """
    look = Look(page_size, scale, window, chunk, softcap, sinks_H)
    compiled = how(q_BHd, k_SGd, v_SGe, look)
    read = (q_BHd, k_SGd, v_SGe, pages_SP, seats_B)
    return attend_work(read, work, look, compiled, out=out, has_trunks=has_trunks)


def attend_work(
    read: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    work: DecodeWork,
    look: Look,
    compiled: How,
    *,
    out: Tensor | None,
    has_trunks: bool | None,
) -> Tensor:
    """Launch trunks, leaves and the joining."""
    # Read by its compiler when it is first needed.
    from miles.kernels.decode_code import attend_items, join_parts

    q_BHd, seats_B, sinks_H = read[0], read[4], look.sinks_H
    rows, heads = q_BHd.shape[:2]
    assert len(seats_B) == rows <= work.max_rows, "as many rows as seats, no more than the work was made for"
    if out is None:
        out = torch.empty((rows, heads, compiled.e), device=q_BHd.device, dtype=q_BHd.dtype)
    assert out.is_contiguous(), "results are written row after row"
    scratch, table = work.scratch(heads, compiled.e), decode_table(compiled, q_BHd.dtype)
    filled = (work.counts, work.length_B, work.base_B, work.items_I)
    written = (*scratch, out, q_BHd if sinks_H is None else sinks_H)
    numbers = (q_BHd.stride(0), read[3].stride(0), look.scale, look.softcap or 0.0)
    started = early(q_BHd.device)

    def launch(queries: int, share: int, trunk: bool) -> None:
        tuning = table[queries]
        tiled = compiled._replace(M=queries, N=tuning.tokens, R=share)
        tuned = {"num_warps": tuning.warps, "num_stages": tuning.stages, **started}
        attend_items[(work.sms * tuning.resident,)](*read, *filled, *written, *numbers, tiled, trunk, **tuned)

    if work.has_trunks if has_trunks is None else has_trunks:
        launch(work.trunk_queries, compiled.r, True)
    queries = min(power(compiled.r), max(table))
    launch(queries, min(compiled.r, queries), False)
    several = max(1, min(JOINED_CHANNELS // compiled.E, 1 << (heads - 1).bit_length()))
    joined = (work.base_B, *scratch, written[3], out, compiled, JOINED, several)
    warps = max(1, compiled.E * JOINED // 1024)
    join_parts[(rows, -(-heads // several))](*joined, num_warps=warps, **started)
    return out


def decode_reference(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    pages_SP: Tensor,
    seats_B: Tensor,
    lengths_B: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """The same, row after row, with sums in float32."""
    look = Look(page_size, scale, window, chunk, softcap, sinks_H)
    out_BHe = q_BHd.new_zeros((*q_BHd.shape[:2], v_SGe.shape[2]))
    for row in lengths_B.nonzero().flatten().tolist():
        pages_P, at_1 = pages_SP[seats_B[row]], lengths_B[row : row + 1] - 1
        out_BHe[row] = over_pages(q_BHd[row : row + 1], k_SGd, v_SGe, pages_P, at_1, look)[0]
    return out_BHe
