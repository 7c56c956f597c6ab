"""Device code of causal attention with several new tokens a sequence: a tile of them meets all that came before.

Shapes: as in ``tile_code``; T new tokens, H = G * r query heads.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from miles.kernels.device_code import jit_paged, tl
from miles.kernels.tile_code import (
    divide,
    exponent,
    lowest_seen,
    nothing_yet,
    read_queries,
    read_sinks,
    sweep,
    write_rows,
)


@jit_paged
def attend_tiles(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    pages_SP: tl.tensor,
    tiles_I4: tl.tensor,
    out_THe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    pages_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
) -> None:
    """One head, and the M queries of a tile from the third number of the program on."""
    head, tile, skipped = tl.program_id(0), tiles_I4 + tl.program_id(1) * 4, tl.program_id(2) * HOW.M
    count = tl.load(tile + 2) - skipped
    if count > 0:
        m_M = tl.arange(0, HOW.M)
        real_M = m_M < count
        row_M = tl.load(tile + 1) + skipped + m_M
        first = tl.load(tile + 3) + skipped
        end = first + tl.minimum(count, HOW.M)
        high_M = tl.minimum(first + m_M, end - 1)
        at_M = row_M.to(tl.int64) * q_stride + head * (HOW.d + HOW.x)
        q_MD, q_MX = read_queries(q_THd, at_M, real_M, HOW)
        group = head // HOW.r
        k, v = k_SGd + group * (HOW.d + HOW.x), v_SGe + group * HOW.e
        pages = pages_SP + tl.load(tiles_I4 + tl.program_id(1) * 4).to(tl.int64) * pages_stride
        low_M = lowest_seen(high_M, HOW)
        # Tiles of tokens: some that not all queries see any more, then those that all see, then the diagonal.
        begin = lowest_seen(first, HOW) // HOW.N * HOW.N
        whole = (lowest_seen(end - 1, HOW) + HOW.N - 1) // HOW.N * HOW.N
        diagonal = tl.maximum((first + 1) // HOW.N * HOW.N, begin)
        whole = tl.minimum(whole, diagonal)
        out_ME, top_M, sum_M = nothing_yet(HOW)
        met = (q_MD, q_MX, k, v, pages)
        how = (low_M, high_M, scale, softcap)
        if HOW.short:
            out_ME, top_M, sum_M = sweep(out_ME, top_M, sum_M, *met, begin, whole, *how, HOW, False, True, False)
        else:
            whole = begin
        out_ME, top_M, sum_M = sweep(out_ME, top_M, sum_M, *met, whole, diagonal, *how, HOW, False, False, False)
        out_ME, top_M, sum_M = sweep(out_ME, top_M, sum_M, *met, diagonal, end, *how, HOW, True, HOW.short, True)
        sink_M = read_sinks(sinks_H, row_M * 0 + head, real_M, HOW)
        out_ME = divide(out_ME, top_M, sum_M, sink_M, exponent(scale, HOW), HOW.sunk)
        write_rows(out_THe, row_M * HOW.heads + head, out_ME, real_M, HOW)
