"""Triton kernels of paged decode attention: persistent programs take split-KV items in turn, then splits are reduced.

Shapes: as in ``tiles_triton``; B rows, H = G * r query heads, I splits, C of them loaded at once for K heads.

A *unit* is an item and query heads of one key-value head, at most R of every row of the item. They are the queries of a
tile: query m is head m % R of row m // R.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.attention.tiles_triton import (
    LOG2E,
    attend_range,
    exp2_factor,
    first_visible,
    init_state,
    join_channels,
    load_queries,
    load_sinks,
    normalize,
    store_rows,
)
from miles.kernels.runtime.triton_compat import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl


@jit_paged
def paged_decode_kernel(
    q_BHd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    block_table_SP: tl.tensor,
    req_slots_B: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    counts: tl.tensor,
    length_B: tl.tensor,
    base_B: tl.tensor,
    items_I: tl.tensor,
    out_IHe: tl.tensor,
    sum_IH: tl.tensor,
    out_BHe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    block_table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    PREFIX: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Prefix or suffix items, as many as ``counts`` holds when the kernel runs."""
    if PDL:
        gdc_launch_dependents()
    UNITS: tl.constexpr = CFG.G * CFG.head_tiles
    num_prefixes, num_suffixes = tl.load(counts), tl.load(counts + 1)
    first_item, units = (num_prefixes * 0, num_prefixes * UNITS) if PREFIX else (num_prefixes, num_suffixes * UNITS)
    for done in range(0, units, tl.num_programs(0)):
        unit = take_unit(done)
        item = items_I + (first_item + tl.minimum(unit, units - 1) // UNITS) * 5
        row, begin, end = tl.load(item), tl.load(item + 3), tl.load(item + 4)
        rows = tl.where(unit < units, tl.load(item + 1), 0)
        row_M, head_M, real_M = find_queries(row, rows, unit % UNITS, CFG)
        low_M = row_M
        if CFG.is_windowed:
            low_M = first_visible(tl.load(length_B + row_M, mask=real_M, other=1) - 1, CFG)
            begin = tl.maximum(begin, tl.min(tl.where(real_M, low_M, end), 0))
        pages = block_table_SP + tl.load(req_slots_B + row).to(tl.int64) * block_table_stride
        if PDL:
            gdc_wait()  # items were written before the first kernel of the step
        queries = load_queries(q_BHd, row_M.to(tl.int64) * q_stride + head_M * (CFG.d + CFG.x), real_M, CFG)
        out_ME, odd_ME, max_M, sum_M = init_state(CFG)
        group = unit % UNITS // CFG.head_tiles
        k, v = k_SGd + group * (CFG.d + CFG.x), v_SGe + group * CFG.e
        head_k_scales, head_v_scales = k_scales + group * CFG.page_size, v_scales + group * CFG.page_size
        kv_inputs = (k, v, head_k_scales, head_v_scales, pages)
        token_range = (begin, tl.where(rows > 0, end, begin), low_M, low_M, scale, softcap)
        out_ME, odd_ME, max_M, sum_M = attend_range(
            out_ME, odd_ME, max_M, sum_M, *queries, *kv_inputs, *token_range, CFG, True, CFG.is_windowed, False
        )
        out_ME = join_channels(out_ME, odd_ME, CFG)
        factor = exp2_factor(scale, CFG)
        is_single_split = False if PREFIX else tl.load(base_B + row + 1) == tl.load(base_B + row) + 1
        if is_single_split:
            out_ME = normalize(out_ME, max_M, sum_M, load_sinks(sinks_H, head_M, real_M, CFG), factor, CFG.has_sinks)
            store_rows(out_BHe, row_M * CFG.heads + head_M, out_ME, real_M, CFG)
        else:
            split_M = (tl.load(base_B + row_M, mask=real_M, other=0) + tl.load(item + 2)) * CFG.heads + head_M
            store_rows(out_IHe, split_M, normalize(out_ME, max_M, sum_M, sum_M, factor, False), real_M, CFG)
            tl.store(sum_IH + split_M, max_M * factor + tl.log2(tl.where(sum_M == 0.0, 1.0, sum_M)), mask=real_M)
    if PDL:
        gdc_wait()  # a program without units must wait too: its end stands for all earlier kernels


@jit
def take_unit(done: tl.tensor) -> Any:
    """The unit this program takes in a round, before which ``done`` units are taken.

    Units are sorted by length. The order alternates: the program with the longest unit of a round takes the shortest of
    the next.
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    return done + tl.where(done // programs % 2 == 0, program, programs - 1 - program)


@jit
def find_queries(row: tl.tensor, rows: tl.tensor, tile: tl.tensor, CFG: tl.constexpr) -> Any:
    """Row and head of each query of a tile, and whether it is real; ``tile`` is the index among the item's tiles."""
    m_M = tl.arange(0, CFG.M)
    head_M = tile % CFG.head_tiles * CFG.R + m_M % CFG.R
    real_M = (m_M // CFG.R < rows) & (head_M < CFG.r)
    head_M = tile // CFG.head_tiles * CFG.r + tl.where(real_M, head_M, 0)
    return tl.where(real_M, row + m_M // CFG.R, row), head_M, real_M


@jit
def reduce_splits_kernel(
    base_B: tl.tensor,
    out_IHe: tl.tensor,
    sum_IH: tl.tensor,
    sinks_H: tl.tensor,
    out_BHe: tl.tensor,
    CFG: tl.constexpr,
    C: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Combine the splits of one row's K heads; rows with one split are done already, rows with none get zeros."""
    if PDL:
        gdc_launch_dependents()
    E: tl.constexpr = CFG.E
    row = tl.program_id(0)
    first, end = tl.load(base_B + row), tl.load(base_B + row + 1)
    offset_C11, channel_11E = tl.arange(0, C)[:, None, None], tl.arange(0, E)[None, None, :]
    head_1K1 = tl.program_id(1) * K + tl.arange(0, K)[None, :, None]
    if PDL:
        gdc_wait()
    if end != first + 1:
        real_1K1, inside_1KE = head_1K1 < CFG.heads, (head_1K1 < CFG.heads) & (channel_11E < CFG.e)
        max_1K1, total_1K1 = tl.full([1, K, 1], float("-inf"), tl.float32), tl.zeros([1, K, 1], tl.float32)
        out_1KE = tl.zeros([1, K, E], tl.float32)
        for start in range(first, end, C):
            split_C11 = start + offset_C11
            valid_C11, index_CK1 = split_C11 < end, split_C11 * CFG.heads + head_1K1
            sum_CK1 = tl.load(sum_IH + index_CK1, mask=valid_C11 & real_1K1, other=float("-inf"))
            at_CKE = out_IHe + index_CK1.to(tl.int64) * CFG.e + channel_11E
            partial_CKE = tl.load(at_CKE, mask=valid_C11 & inside_1KE, other=0.0)
            new_max_1K1 = tl.maximum(max_1K1, tl.max(sum_CK1, 0, keep_dims=True))
            finite_max_1K1 = tl.where(new_max_1K1 == float("-inf"), 0.0, new_max_1K1)
            weight_CK1, rescale_1K1 = tl.exp2(sum_CK1 - finite_max_1K1), tl.exp2(max_1K1 - finite_max_1K1)
            out_1KE = out_1KE * rescale_1K1 + tl.sum(partial_CKE * weight_CK1, 0, keep_dims=True)
            total_1K1, max_1K1 = total_1K1 * rescale_1K1 + tl.sum(weight_CK1, 0, keep_dims=True), new_max_1K1
        if CFG.has_sinks:
            sink_1K1 = tl.load(sinks_H + head_1K1, mask=real_1K1, other=0.0).to(tl.float32) * LOG2E
            total_1K1 += tl.exp2(sink_1K1 - tl.where(max_1K1 == float("-inf"), 0.0, max_1K1))
        out_1KE = out_1KE / tl.where(total_1K1 == 0.0, 1.0, total_1K1)
        at_1KE = out_BHe + (row * CFG.heads + head_1K1) * CFG.e + channel_11E
        tl.store(at_1KE, out_1KE.to(out_BHe.dtype.element_ty), mask=inside_1KE)
