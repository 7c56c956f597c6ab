"""Device code of tiles of queries that follow each other: a trainer's sequences, and an engine's prompts in pages.

Shapes: as in ``attention_code``; T queries, I tiles, H = G * r query heads.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import jit, jit_paged, tl
from miles.kernels.exact.attention_code import CHUNK, add_sink, bound, divide, find, join, meet, read
from miles.kernels.tile_code import lowest_seen

LN2 = tl.constexpr(0.6931471805599453)


@jit
def nothing(M: tl.constexpr, E: tl.constexpr) -> Any:
    """The state of queries that have met no key."""
    return tl.zeros([M, E], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M, 16], tl.float32)


@jit
def block(
    out_ME: tl.tensor,
    top_M: tl.tensor,
    sum_MX: tl.tensor,
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Queries meet the keys at positions ``at`` to ``at + N``; without MASKED every one sees all of them."""
    token_N = at + tl.arange(0, HOW.N)
    row_N, there_N = find(pages, token_N, end, HOW), token_N < end
    k_ND = read(k, row_N, there_N, 0, HOW.k_stride, HOW.d, HOW.D, MASKED)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    score_MN = bound(score_MN, bend, cap, HOW)
    if MASKED:
        seen_MN = token_N[None, :] <= high_M[:, None]
        if HOW.short:
            seen_MN = seen_MN & (token_N[None, :] >= low_M[:, None])
        score_MN = tl.where(seen_MN, score_MN, float("-inf"))
    v_NE = read(v, row_N, there_N, first, HOW.v_stride, HOW.e, HOW.E, MASKED)
    return meet(out_ME, top_M, sum_MX, score_MN, v_NE, factor, MASKED)


@jit
def sweep(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    channel: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
) -> Any:
    """The state of queries from position ``first`` on after all they see, which begins at ``begin`` or later."""
    met, told = (q_MD, k, v, pages), (end, channel, low_M, high_M, factor, bend, cap)
    out_ME, top_M, sum_MX = nothing(HOW.M, HOW.E)
    # Chunks that all queries see whole, then those of which some do not see all. A loop for each chunk: the compiler
    # then knows when it must wait for a product that is under way.
    chunk = begin // CHUNK * CHUNK
    whole = chunk if HOW.short else (first + 1) // CHUNK * CHUNK
    for at_chunk in range(chunk, whole, CHUNK):
        part_ME, part_M, part_MX = nothing(HOW.M, HOW.E)
        for at in range(at_chunk, at_chunk + CHUNK, HOW.N):
            part_ME, part_M, part_MX = block(part_ME, part_M, part_MX, *met, at, *told, HOW, False)
        out_ME, top_M, sum_MX = join(out_ME, top_M, sum_MX, part_ME, part_M, part_MX)
    for at_chunk in range(whole, end, CHUNK):
        part_ME, part_M, part_MX = nothing(HOW.M, HOW.E)
        for at in range(tl.maximum(at_chunk, begin), tl.minimum(at_chunk + CHUNK, end), HOW.N):
            part_ME, part_M, part_MX = block(part_ME, part_M, part_MX, *met, at, *told, HOW, True)
        out_ME, top_M, sum_MX = join(out_ME, top_M, sum_MX, part_ME, part_M, part_MX)
    return out_ME, top_M, sum_MX


@jit_paged
def attend_tiles(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    pages_SP: tl.tensor,
    tiles_I4: tl.tensor,
    out_THe: tl.tensor,
    lse_TH: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    pages_stride: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
    PARTS: tl.constexpr,
    KEEP: tl.constexpr,
) -> None:
    """One head, and M queries of a tile; a tile: its keys' seat or first row, first query, queries, first position."""
    head, tile = tl.program_id(0), tiles_I4 + tl.program_id(1) * 4
    skipped, channel = tl.program_id(2) // PARTS * HOW.M, tl.program_id(2) % PARTS * HOW.E
    count = tl.load(tile + 2) - skipped
    if count > 0:
        place, m_M = tl.load(tile).to(tl.int64), tl.arange(0, HOW.M)
        real_M = m_M < count
        row_M = tl.load(tile + 1) + skipped + tl.where(real_M, m_M, 0)
        first = tl.load(tile + 3) + skipped
        end = first + tl.minimum(count, HOW.M)
        high_M = tl.minimum(first + m_M, end - 1)
        low_M = lowest_seen(high_M, HOW)
        q_MD = read(q_THd + head * HOW.d, row_M.to(tl.int64) * q_stride, real_M, 0, 1, HOW.d, HOW.D, True)
        k, v, pages = k_SGd + head // HOW.r * HOW.d, v_SGe + head // HOW.r * HOW.e, pages_SP
        if HOW.page > 0:
            pages += place * pages_stride
        else:
            k, v = k + place * HOW.k_stride, v + place * HOW.v_stride
        told = (end, channel, low_M, high_M, factor, bend, cap)
        begin = lowest_seen(first, HOW) // HOW.N * HOW.N
        out_ME, top_M, sum_MX = sweep(q_MD, k, v, pages, begin, first, *told, HOW)
        total_M = tl.max(sum_MX, 1)
        if HOW.sunk:
            total_M = add_sink(top_M, total_M, tl.zeros_like(total_M) + tl.load(sinks_H + head).to(tl.float32))
        out_ME = divide(out_ME, total_M[:, None])
        channel_E = channel + tl.arange(0, HOW.E)
        at_M = row_M.to(tl.int64) * HOW.heads + head
        written_ME = real_M[:, None] & (channel_E < HOW.e)[None, :]
        tl.store(out_THe + at_M[:, None] * HOW.e + channel_E[None, :], out_ME.to(out_THe.dtype.element_ty), written_ME)
        if KEEP:
            tl.store(lse_TH + at_M, (top_M + tl.log2(total_M)) * LN2, mask=real_M & (channel == 0))
