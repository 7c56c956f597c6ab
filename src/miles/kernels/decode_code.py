"""Device code of attention with one new token a row: programs take items in turn, then partial results are joined.

Shapes: as in ``tile_code``; B rows, H = G * r query heads, I places of partial results, C of them read at once
for K heads.

A *unit* is an item and query heads of one key-value head, at most R of every row of the item. They are the queries of
a tile: query m is head m % R of row m // R.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl
from miles.kernels.tile_code import (
    LOG2E,
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
def attend_items(
    q_BHd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    pages_SP: tl.tensor,
    seats_B: tl.tensor,
    counts: tl.tensor,
    length_B: tl.tensor,
    base_B: tl.tensor,
    items_I: tl.tensor,
    out_IHe: tl.tensor,
    sum_IH: tl.tensor,
    out_BHe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    pages_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
    TRUNK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Items of trunks or of leaves, as many as ``counts`` says when this runs."""
    if EARLY:
        gdc_launch_dependents()
    UNITS: tl.constexpr = HOW.G * HOW.parts
    trunks, leaves = tl.load(counts), tl.load(counts + 1)
    skipped, units = (trunks * 0, trunks * UNITS) if TRUNK else (trunks, leaves * UNITS)
    for done in range(0, units, tl.num_programs(0)):
        unit = take_turn(done)
        item = items_I + (skipped + tl.minimum(unit, units - 1) // UNITS) * 5
        row, begin, end = tl.load(item), tl.load(item + 3), tl.load(item + 4)
        rows = tl.where(unit < units, tl.load(item + 1), 0)
        row_M, head_M, real_M = find_queries(row, rows, unit % UNITS, HOW)
        low_M = row_M
        if HOW.short:
            low_M = lowest_seen(tl.load(length_B + row_M, mask=real_M, other=1) - 1, HOW)
            begin = tl.maximum(begin, tl.min(tl.where(real_M, low_M, end), 0))
        pages = pages_SP + tl.load(seats_B + row).to(tl.int64) * pages_stride
        if EARLY:
            gdc_wait()  # what there is to do was known before the step's first kernel
        q_MD, q_MX = read_queries(q_BHd, row_M.to(tl.int64) * q_stride + head_M * (HOW.d + HOW.x), real_M, HOW)
        out_ME, top_M, sum_M = nothing_yet(HOW)
        group = unit % UNITS // HOW.parts
        k, v = k_SGd + group * (HOW.d + HOW.x), v_SGe + group * HOW.e
        met = (k, v, pages, begin, tl.where(rows > 0, end, begin), low_M, low_M, scale, softcap)
        out_ME, top_M, sum_M = sweep(out_ME, top_M, sum_M, q_MD, q_MX, *met, HOW, True, HOW.short, False)
        factor = exponent(scale, HOW)
        alone = False if TRUNK else tl.load(base_B + row + 1) == tl.load(base_B + row) + 1
        if alone:
            out_ME = divide(out_ME, top_M, sum_M, read_sinks(sinks_H, head_M, real_M, HOW), factor, HOW.sunk)
            write_rows(out_BHe, row_M * HOW.heads + head_M, out_ME, real_M, HOW)
        else:
            place_M = (tl.load(base_B + row_M, mask=real_M, other=0) + tl.load(item + 2)) * HOW.heads + head_M
            write_rows(out_IHe, place_M, divide(out_ME, top_M, sum_M, sum_M, factor, False), real_M, HOW)
            tl.store(sum_IH + place_M, top_M * factor + tl.log2(tl.where(sum_M == 0.0, 1.0, sum_M)), mask=real_M)
    if EARLY:
        gdc_wait()  # where there is no unit nobody has, and the next takes this one's end for that of all before it


@jit
def take_turn(done: tl.tensor) -> Any:
    """The unit this program takes of the round before which so many are done.

    Units come in order of length. There and back again: who took the longest of one round takes the shortest of the
    next.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    return done + tl.where(done // programs % 2 == 0, program, programs - 1 - program)


@jit
def find_queries(row: tl.tensor, rows: tl.tensor, heads: tl.tensor, HOW: tl.constexpr) -> Any:
    """Row and head of each query of a tile, and whether there is such a one; ``heads``: which of an item's tiles."""
    m_M = tl.arange(0, HOW.M)
    head_M = heads % HOW.parts * HOW.R + m_M % HOW.R
    real_M = (m_M // HOW.R < rows) & (head_M < HOW.r)
    head_M = heads // HOW.parts * HOW.r + tl.where(real_M, head_M, 0)
    return tl.where(real_M, row + m_M // HOW.R, row), head_M, real_M


@jit
def join_parts(
    base_B: tl.tensor,
    out_IHe: tl.tensor,
    sum_IH: tl.tensor,
    sinks_H: tl.tensor,
    out_BHe: tl.tensor,
    HOW: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """Weigh the partial results of one row's K heads by their sums; rows with one have it already, with none zeros."""
    if EARLY:
        gdc_launch_dependents()
    E: tl.constexpr = HOW.E
    row = tl.program_id(0)
    first, end = tl.load(base_B + row), tl.load(base_B + row + 1)
    part_C11, channel_11E = tl.arange(0, C)[:, None, None], tl.arange(0, E)[None, None, :]
    head_1K1 = tl.program_id(1) * K + tl.arange(0, K)[None, :, None]
    if EARLY:
        gdc_wait()
    if end != first + 1:
        there_1K1, inside_1KE = head_1K1 < HOW.heads, (head_1K1 < HOW.heads) & (channel_11E < HOW.e)
        top_1K1, total_1K1 = tl.full([1, K, 1], float("-inf"), tl.float32), tl.zeros([1, K, 1], tl.float32)
        out_1KE = tl.zeros([1, K, E], tl.float32)
        for at in range(first, end, C):
            place_C11 = at + part_C11
            seen_C11, at_CK1 = place_C11 < end, place_C11 * HOW.heads + head_1K1
            sum_CK1 = tl.load(sum_IH + at_CK1, mask=seen_C11 & there_1K1, other=float("-inf"))
            at_CKE = out_IHe + at_CK1.to(tl.int64) * HOW.e + channel_11E
            part_CKE = tl.load(at_CKE, mask=seen_C11 & inside_1KE, other=0.0)
            new_1K1 = tl.maximum(top_1K1, tl.max(sum_CK1, 0, keep_dims=True))
            under_1K1 = tl.where(new_1K1 == float("-inf"), 0.0, new_1K1)
            weight_CK1, shrink_1K1 = tl.exp2(sum_CK1 - under_1K1), tl.exp2(top_1K1 - under_1K1)
            out_1KE = out_1KE * shrink_1K1 + tl.sum(part_CKE * weight_CK1, 0, keep_dims=True)
            total_1K1, top_1K1 = total_1K1 * shrink_1K1 + tl.sum(weight_CK1, 0, keep_dims=True), new_1K1
        if HOW.sunk:
            sink_1K1 = tl.load(sinks_H + head_1K1, mask=there_1K1, other=0.0).to(tl.float32) * LOG2E
            total_1K1 += tl.exp2(sink_1K1 - tl.where(top_1K1 == float("-inf"), 0.0, top_1K1))
        out_1KE = out_1KE / tl.where(total_1K1 == 0.0, 1.0, total_1K1)
        at_1KE = out_BHe + (row * HOW.heads + head_1K1) * HOW.e + channel_11E
        tl.store(at_1KE, out_1KE.to(out_BHe.dtype.element_ty), mask=inside_1KE)
