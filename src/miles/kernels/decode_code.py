"""Device code of attention with one new token a row: programs take items in turn, then partial results are joined.

Shapes: as in ``tile_code``; B rows, H = G * r query heads, I places of partial results, C of them read at once.

A *unit* is an item and query heads of one key-value head, at most R of every row of the item. They are the queries of
a tile: query m is head m % R of row m // R.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import gdc_launch_dependents, gdc_wait, jit, tl
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


@jit
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
    EARLY: tl.constexpr,
) -> None:
    """Weigh the partial results of one row and head by their sums; rows with one have it already, with none zeros."""
    if EARLY:
        gdc_launch_dependents()
    E: tl.constexpr = HOW.E
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(base_B + row), tl.load(base_B + row + 1)
    channel_E = tl.arange(0, E)
    if EARLY:
        gdc_wait()
    if end != first + 1:
        top, total, out_E = float("-inf"), 0.0, tl.zeros([E], tl.float32)
        for at in range(first, end, C):
            place_C = at + tl.arange(0, C)
            sum_C = tl.load(sum_IH + place_C * HOW.heads + head, mask=place_C < end, other=float("-inf"))
            seen_CE = (place_C < end)[:, None] & (channel_E < HOW.e)[None, :]
            at_CE = (place_C * HOW.heads + head).to(tl.int64)[:, None] * HOW.e + channel_E[None, :]
            part_CE = tl.load(out_IHe + at_CE, mask=seen_CE, other=0.0)
            new = tl.maximum(top, tl.max(sum_C, 0))
            under = tl.where(new == float("-inf"), 0.0, new)
            weight_C, shrink = tl.exp2(sum_C - under), tl.exp2(top - under)
            out_E = out_E * shrink + tl.sum(part_CE * weight_C[:, None], 0)
            total, top = total * shrink + tl.sum(weight_C, 0), new
        if HOW.sunk:
            sink = tl.load(sinks_H + head).to(tl.float32) * LOG2E
            total += tl.exp2(sink - tl.where(top == float("-inf"), 0.0, top))
        out_E = out_E / tl.where(total == 0.0, 1.0, total)
        at_E = out_BHe + (row * HOW.heads + head) * HOW.e + channel_E
        tl.store(at_E, out_E.to(out_BHe.dtype.element_ty), mask=channel_E < HOW.e)
