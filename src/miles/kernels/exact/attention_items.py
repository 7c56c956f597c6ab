"""Device code of rows with one new token each: every chunk of a past by itself, then the chunks of a row in order.

Shapes: as in ``attention_code``; B rows, I partial results, H = G * r query heads. Items: see ``attention_work``.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.decode_code import find_queries, take_turn
from miles.kernels.device_code import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl
from miles.kernels.exact.attention_code import (
    CHUNK,
    add_sink,
    bound,
    divide,
    find,
    join,
    join_across,
    meet_across,
    read,
)
from miles.kernels.tile_code import lowest_seen


@jit
def nothing_across(M: tl.constexpr, E: tl.constexpr, X: tl.constexpr) -> Any:
    """The state of queries that have met no key, across."""
    return tl.zeros([E, M], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([X, M], tl.float32)


@jit
def begun(part_IHe: tl.tensor, part_IH2: tl.tensor, at_M: tl.tensor, real_M: tl.tensor, HOW: tl.constexpr) -> Any:
    """The state in which a trunk left its last chunk, across."""
    X: tl.constexpr = HOW.X
    channel_E = tl.arange(0, HOW.E)
    seen_EM = (channel_E < HOW.e)[:, None] & real_M[None, :]
    at_M = at_M.to(tl.int64)
    out_EM = tl.load(part_IHe + at_M[None, :] * HOW.e + channel_E[:, None], mask=seen_EM, other=0.0)
    top_M = tl.load(part_IH2 + at_M * 2, mask=real_M, other=float("-inf"))
    sum_M = tl.load(part_IH2 + at_M * 2 + 1, mask=real_M, other=0.0)
    return out_EM, top_M, tl.broadcast_to(sum_M[None, :], [X, HOW.M])


@jit
def write(held: tl.tensor, row_M: tl.tensor, out_EM: tl.tensor, real_M: tl.tensor, HOW: tl.constexpr) -> None:
    """Rows of ``e`` channels, one behind the other."""
    out_ME, channel_E = tl.trans(out_EM), tl.arange(0, HOW.E)
    at_ME = held + row_M.to(tl.int64)[:, None] * HOW.e + channel_E[None, :]
    tl.store(at_ME, out_ME.to(held.dtype.element_ty), mask=real_M[:, None] & (channel_E < HOW.e)[None, :])


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
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    out_BHe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    pages_stride: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
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
    if EARLY:
        gdc_wait()
    for done in range(0, units, tl.num_programs(0)):
        unit = take_turn(done)
        item = items_I + (skipped + tl.minimum(unit, units - 1) // UNITS) * 5
        row, begin, end = tl.load(item), tl.load(item + 3), tl.load(item + 4)
        rows = tl.where(unit < units, tl.load(item + 1), 0)
        row_M, head_M, real_M = find_queries(row, rows, unit % UNITS, HOW)
        place_M = tl.load(base_B + row_M, mask=real_M, other=0) + tl.load(item + 2)
        place_M = place_M * HOW.heads + head_M
        q_MD = read(q_BHd, row_M.to(tl.int64) * q_stride + head_M * HOW.d, real_M, 0, 1, HOW.d, HOW.D, True)
        pages = pages_SP + tl.load(seats_B + row).to(tl.int64) * pages_stride
        group = unit % UNITS // HOW.parts
        out_EM, top_M, sum_XM = sweep(
            *(q_MD, k_SGd + group * HOW.d, v_SGe + group * HOW.e, pages, length_B, row_M, real_M),
            *(begin, tl.where(rows > 0, end, begin), part_IHe, part_IH2, place_M, factor, bend, cap, HOW, TRUNK),
        )
        sum_M = tl.max(sum_XM, 0)
        alone = False if TRUNK else tl.load(base_B + row + 1) == tl.load(base_B + row) + 1
        if alone:
            if HOW.sunk:
                sink_M = tl.load(sinks_H + head_M, mask=real_M, other=0.0).to(tl.float32)
                sum_M = add_sink(top_M, sum_M, sink_M)
            write(out_BHe, row_M * HOW.heads + head_M, divide(out_EM, sum_M[None, :]), real_M, HOW)
        else:
            write(part_IHe, place_M, out_EM, real_M, HOW)
            tl.store(part_IH2 + place_M.to(tl.int64) * 2, top_M, mask=real_M)
            tl.store(part_IH2 + place_M.to(tl.int64) * 2 + 1, sum_M, mask=real_M)


@jit
def sweep(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    length_B: tl.tensor,
    row_M: tl.tensor,
    real_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    place_M: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
    TRUNK: tl.constexpr,
) -> Any:
    """The state after positions [begin, end); where they begin within a chunk, a trunk has met what lies before."""
    low_M, first = row_M, begin
    if HOW.short:
        low_M = lowest_seen(tl.load(length_B + row_M, mask=real_M, other=1) - 1, HOW)
        first = tl.maximum(begin, tl.min(tl.where(real_M, low_M, end), 0) // HOW.N * HOW.N)
    out_EM, top_M, sum_XM = nothing_across(HOW.M, HOW.E, HOW.X)
    for chunk in range(begin // CHUNK * CHUNK, end, CHUNK):
        part_EM, part_M, part_XM = nothing_across(HOW.M, HOW.E, HOW.X)
        if not TRUNK:  # noqa: SIM102  (known to the compiler, unlike what is asked next)
            if begin > chunk:
                part_EM, part_M, part_XM = begun(part_IHe, part_IH2, place_M, real_M, HOW)
        for at in range(tl.maximum(chunk, first), tl.minimum(chunk + CHUNK, end), HOW.N):
            token_N = at + tl.arange(0, HOW.N)
            row_N, there_N = find(pages, token_N, end, HOW), token_N < end
            k_ND = read(k, row_N, there_N, 0, HOW.k_stride, HOW.d, HOW.D, True)
            score_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
            score_NM = bound(score_NM, bend, cap, HOW)
            seen_NM = there_N[:, None]
            if HOW.short:
                seen_NM = seen_NM & (token_N[:, None] >= low_M[None, :])
            score_NM = tl.where(seen_NM, score_NM, float("-inf"))
            v_NE = read(v, row_N, there_N, 0, HOW.v_stride, HOW.e, HOW.E, True)
            part_EM, part_M, part_XM = meet_across(part_EM, part_M, part_XM, score_NM, v_NE, factor)
        out_EM, top_M, sum_XM = join_across(out_EM, top_M, sum_XM, part_EM, part_M, part_XM)
    return out_EM, top_M, sum_XM


@jit
def join_parts(
    base_B: tl.tensor,
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    sinks_H: tl.tensor,
    out_BHe: tl.tensor,
    HOW: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """The chunks of one row and head, in order; rows with one have their result already, with none get zeros."""
    if EARLY:
        gdc_launch_dependents()
    E: tl.constexpr = HOW.E
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(base_B + row), tl.load(base_B + row + 1)
    channel_E = tl.arange(0, E)
    if EARLY:
        gdc_wait()
    if end != first + 1:
        # A row of one query: as a tile it would be [1, E].
        top_1, sum_11 = tl.full([1], float("-inf"), tl.float32), tl.zeros([1, 1], tl.float32)
        out_1E = tl.zeros([1, E], tl.float32)
        for place in range(first, end):
            at = (place * HOW.heads + head).to(tl.int64)
            part_1E = tl.load(part_IHe + at * HOW.e + channel_E, mask=channel_E < HOW.e, other=0.0)[None, :]
            part_1 = tl.load(part_IH2 + at * 2 + tl.arange(0, 1))
            part_11 = tl.load(part_IH2 + at * 2 + 1 + tl.arange(0, 1))[None, :]
            out_1E, top_1, sum_11 = join(out_1E, top_1, sum_11, part_1E, part_1, part_11)
        total_1 = tl.max(sum_11, 1)
        if HOW.sunk:
            total_1 = add_sink(top_1, total_1, tl.load(sinks_H + head + tl.arange(0, 1)).to(tl.float32))
        out_1E = divide(out_1E, total_1[:, None])
        at_1E = out_BHe + (row * HOW.heads + head) * HOW.e + channel_E[None, :]
        tl.store(at_1E, out_1E.to(out_BHe.dtype.element_ty), mask=(channel_E < HOW.e)[None, :])
