"""Triton kernels of batch-invariant paged decode: every chunk of a row by itself, then the chunks of a row in order.

Shapes: as in ``attention_triton``; B rows, I partial results, H = G * r query heads. Items: see ``attention_split_kv``.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.attention.paged_decode_triton import find_queries, take_unit
from miles.kernels.attention.tiles_triton import dequantize, first_visible
from miles.kernels.batch_invariant.attention_triton import (
    CHUNK,
    add_sink,
    apply_softcap,
    find_rows,
    load_rows,
    merge_states,
    merge_states_transposed,
    normalize,
    update_state_transposed,
)
from miles.kernels.runtime.triton_compat import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl


@jit
def init_state_transposed(M: tl.constexpr, E: tl.constexpr, X: tl.constexpr) -> Any:
    """The state of queries that have seen no key, queries as columns."""
    return tl.zeros([E, M], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([X, M], tl.float32)


@jit
def load_prefix_state(
    part_IHe: tl.tensor, part_IH2: tl.tensor, index_M: tl.tensor, real_M: tl.tensor, CFG: tl.constexpr
) -> Any:
    """The state in which a prefix left its last chunk, queries as columns."""
    X: tl.constexpr = CFG.X
    channel_E = tl.arange(0, CFG.E)
    valid_EM = (channel_E < CFG.e)[:, None] & real_M[None, :]
    index_M = index_M.to(tl.int64)
    out_EM = tl.load(part_IHe + index_M[None, :] * CFG.e + channel_E[:, None], mask=valid_EM, other=0.0)
    max_M = tl.load(part_IH2 + index_M * 2, mask=real_M, other=float("-inf"))
    sum_M = tl.load(part_IH2 + index_M * 2 + 1, mask=real_M, other=0.0)
    return out_EM, max_M, tl.broadcast_to(sum_M[None, :], [X, CFG.M])


@jit
def store_transposed(
    base: tl.tensor, row_M: tl.tensor, out_EM: tl.tensor, real_M: tl.tensor, CFG: tl.constexpr
) -> None:
    """Store contiguous rows of ``e`` channels."""
    out_ME, channel_E = tl.trans(out_EM), tl.arange(0, CFG.E)
    at_ME = base + row_M.to(tl.int64)[:, None] * CFG.e + channel_E[None, :]
    tl.store(at_ME, out_ME.to(base.dtype.element_ty), mask=real_M[:, None] & (channel_E < CFG.e)[None, :])


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
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    out_BHe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    block_table_stride: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
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
    if PDL:
        gdc_wait()
    for done in range(0, units, tl.num_programs(0)):
        unit = take_unit(done)
        item = items_I + (first_item + tl.minimum(unit, units - 1) // UNITS) * 5
        row, begin, end = tl.load(item), tl.load(item + 3), tl.load(item + 4)
        rows = tl.where(unit < units, tl.load(item + 1), 0)
        row_M, head_M, real_M = find_queries(row, rows, unit % UNITS, CFG)
        split_M = tl.load(base_B + row_M, mask=real_M, other=0) + tl.load(item + 2)
        split_M = split_M * CFG.heads + head_M
        q_MD = load_rows(q_BHd, row_M.to(tl.int64) * q_stride + head_M * CFG.d, real_M, 0, 1, CFG.d, CFG.D, True)
        pages = block_table_SP + tl.load(req_slots_B + row).to(tl.int64) * block_table_stride
        group = unit % UNITS // CFG.head_tiles
        keys_values = (k_SGd + group * CFG.d, v_SGe + group * CFG.e)
        scales = (k_scales + group * CFG.page_size, v_scales + group * CFG.page_size)
        kv_inputs = (pages, length_B, row_M, real_M)
        partials = (part_IHe, part_IH2, split_M)
        out_EM, max_M, sum_XM = attend_range(
            q_MD,
            *keys_values,
            *scales,
            *kv_inputs,
            begin,
            tl.where(rows > 0, end, begin),
            *partials,
            exp2_factor,
            softcap_factor,
            softcap,
            CFG,
            PREFIX,
        )
        sum_M = tl.max(sum_XM, 0)
        is_single_chunk = False if PREFIX else tl.load(base_B + row + 1) == tl.load(base_B + row) + 1
        if is_single_chunk:
            if CFG.has_sinks:
                sink_M = tl.load(sinks_H + head_M, mask=real_M, other=0.0).to(tl.float32)
                sum_M = add_sink(max_M, sum_M, sink_M)
            store_transposed(out_BHe, row_M * CFG.heads + head_M, normalize(out_EM, sum_M[None, :]), real_M, CFG)
        else:
            store_transposed(part_IHe, split_M, out_EM, real_M, CFG)
            tl.store(part_IH2 + split_M.to(tl.int64) * 2, max_M, mask=real_M)
            tl.store(part_IH2 + split_M.to(tl.int64) * 2 + 1, sum_M, mask=real_M)


@jit
def attend_range(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    length_B: tl.tensor,
    row_M: tl.tensor,
    real_M: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    split_M: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    PREFIX: tl.constexpr,
) -> Any:
    """The state after positions [begin, end); if they begin within a chunk, a prefix has covered what is before."""
    low_M, first = row_M, begin
    if CFG.is_windowed:
        low_M = first_visible(tl.load(length_B + row_M, mask=real_M, other=1) - 1, CFG)
        first = tl.maximum(begin, tl.min(tl.where(real_M, low_M, end), 0) // CFG.N * CFG.N)
    out_EM, max_M, sum_XM = init_state_transposed(CFG.M, CFG.E, CFG.X)
    for chunk_start in range(begin // CHUNK * CHUNK, end, CHUNK):
        chunk_EM, chunk_max_M, chunk_XM = init_state_transposed(CFG.M, CFG.E, CFG.X)
        if not PREFIX:  # noqa: SIM102  (constexpr, unlike the next condition)
            if begin > chunk_start:
                chunk_EM, chunk_max_M, chunk_XM = load_prefix_state(part_IHe, part_IH2, split_M, real_M, CFG)
        for start in range(tl.maximum(chunk_start, first), tl.minimum(chunk_start + CHUNK, end), CFG.N):
            token_N = start + tl.arange(0, CFG.N)
            row_N, valid_N = find_rows(pages, token_N, end, CFG), token_N < end
            k_ND = load_rows(k, row_N, valid_N, 0, CFG.k_stride, CFG.d, CFG.D, True)
            k_ND = dequantize(k_ND, k_scales, row_N, valid_N, q_MD.dtype, CFG)
            score_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
            score_NM = apply_softcap(score_NM, softcap_factor, softcap, CFG)
            visible_NM = valid_N[:, None]
            if CFG.is_windowed:
                visible_NM = visible_NM & (token_N[:, None] >= low_M[None, :])
            score_NM = tl.where(visible_NM, score_NM, float("-inf"))
            v_NE = load_rows(v, row_N, valid_N, 0, CFG.v_stride, CFG.e, CFG.E, True)
            v_NE = dequantize(v_NE, v_scales, row_N, valid_N, q_MD.dtype, CFG)
            chunk_EM, chunk_max_M, chunk_XM = update_state_transposed(
                chunk_EM, chunk_max_M, chunk_XM, score_NM, v_NE, exp2_factor
            )
        out_EM, max_M, sum_XM = merge_states_transposed(out_EM, max_M, sum_XM, chunk_EM, chunk_max_M, chunk_XM)
    return out_EM, max_M, sum_XM


@jit
def reduce_chunks_kernel(
    base_B: tl.tensor,
    part_IHe: tl.tensor,
    part_IH2: tl.tensor,
    sinks_H: tl.tensor,
    out_BHe: tl.tensor,
    CFG: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Merge the chunks of one row and head in order; rows with one are done already, rows with none get zeros."""
    if PDL:
        gdc_launch_dependents()
    E: tl.constexpr = CFG.E
    row, head = tl.program_id(0), tl.program_id(1)
    first, end = tl.load(base_B + row), tl.load(base_B + row + 1)
    channel_E = tl.arange(0, E)
    if PDL:
        gdc_wait()
    if end != first + 1:
        # One query: as a tile it has shape [1, E].
        max_1, sum_11 = tl.full([1], float("-inf"), tl.float32), tl.zeros([1, 1], tl.float32)
        out_1E = tl.zeros([1, E], tl.float32)
        for place in range(first, end):
            start = (place * CFG.heads + head).to(tl.int64)
            chunk_1E = tl.load(part_IHe + start * CFG.e + channel_E, mask=channel_E < CFG.e, other=0.0)[None, :]
            chunk_max_1 = tl.load(part_IH2 + start * 2 + tl.arange(0, 1))
            chunk_11 = tl.load(part_IH2 + start * 2 + 1 + tl.arange(0, 1))[None, :]
            out_1E, max_1, sum_11 = merge_states(out_1E, max_1, sum_11, chunk_1E, chunk_max_1, chunk_11)
        total_1 = tl.max(sum_11, 1)
        if CFG.has_sinks:
            total_1 = add_sink(max_1, total_1, tl.load(sinks_H + head + tl.arange(0, 1)).to(tl.float32))
        out_1E = normalize(out_1E, total_1[:, None])
        at_1E = out_BHe + (row * CFG.heads + head) * CFG.e + channel_E[None, :]
        tl.store(at_1E, out_1E.to(out_BHe.dtype.element_ty), mask=(channel_E < CFG.e)[None, :])
