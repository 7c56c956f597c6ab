"""Triton kernel of batch-invariant attention for tiles of consecutive queries: packed sequences, and paged prefill.

Shapes: as in ``attention_triton``; T queries, I tiles, H = G * r query heads.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.attention.tiles_triton import dequantize, extend_visible, first_visible
from miles.kernels.batch_invariant.attention_triton import (
    CHUNK,
    add_sink,
    apply_softcap,
    find_rows,
    load_rows,
    merge_states,
    normalize,
    update_state,
)
from miles.kernels.runtime.triton_compat import jit, jit_paged, tl

LN2 = tl.constexpr(0.6931471805599453)


@jit
def init_state(M: tl.constexpr, E: tl.constexpr) -> Any:
    """The state of queries that have seen no key."""
    return tl.zeros([M, E], tl.float32), tl.full([M], float("-inf"), tl.float32), tl.zeros([M, 16], tl.float32)


@jit
def attend_block(
    out_ME: tl.tensor,
    max_M: tl.tensor,
    sum_MX: tl.tensor,
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    first: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Attend to the keys at positions ``start`` to ``start + N``; without MASKED every query sees all of them."""
    token_N = start + tl.arange(0, CFG.N)
    row_N, valid_N = find_rows(pages, token_N, end, CFG), token_N < end
    k_ND = load_rows(k, row_N, valid_N, 0, CFG.k_stride, CFG.d, CFG.D, MASKED)
    k_ND = dequantize(k_ND, k_scales, row_N, valid_N, q_MD.dtype, CFG)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    score_MN = apply_softcap(score_MN, softcap_factor, softcap, CFG)
    if MASKED:
        visible_MN = token_N[None, :] <= high_M[:, None]
        if CFG.is_windowed:
            visible_MN = visible_MN & (token_N[None, :] >= low_M[:, None])
        score_MN = tl.where(visible_MN, score_MN, float("-inf"))
    v_NE = load_rows(v, row_N, valid_N, first, CFG.v_stride, CFG.e, CFG.E, MASKED)
    v_NE = dequantize(v_NE, v_scales, row_N, valid_N, q_MD.dtype, CFG)
    return update_state(out_ME, max_M, sum_MX, score_MN, v_NE, exp2_factor, MASKED)


@jit
def attend_chunks(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    channel: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """The state of queries from position ``first`` on after all visible keys, which begin at ``begin`` or later."""
    kv_inputs = (q_MD, k, v, k_scales, v_scales, pages)
    block_inputs = (end, channel, low_M, high_M, exp2_factor, softcap_factor, softcap)
    out_ME, max_M, sum_MX = init_state(CFG.M, CFG.E)
    # Chunks that all queries see completely, then those that are partly masked. A loop per chunk lets the compiler know
    # when it must wait for an asynchronous matmul.
    first_chunk = begin // CHUNK * CHUNK
    masked_begin = first_chunk if CFG.is_windowed else (first + 1) // CHUNK * CHUNK
    for chunk_start in range(first_chunk, masked_begin, CHUNK):
        chunk_ME, chunk_max_M, chunk_MX = init_state(CFG.M, CFG.E)
        for start in range(chunk_start, chunk_start + CHUNK, CFG.N):
            chunk_ME, chunk_max_M, chunk_MX = attend_block(
                chunk_ME, chunk_max_M, chunk_MX, *kv_inputs, start, *block_inputs, CFG, False
            )
        out_ME, max_M, sum_MX = merge_states(out_ME, max_M, sum_MX, chunk_ME, chunk_max_M, chunk_MX)
    for chunk_start in range(masked_begin, end, CHUNK):
        chunk_ME, chunk_max_M, chunk_MX = init_state(CFG.M, CFG.E)
        for start in range(tl.maximum(chunk_start, begin), tl.minimum(chunk_start + CHUNK, end), CFG.N):
            chunk_ME, chunk_max_M, chunk_MX = attend_block(
                chunk_ME, chunk_max_M, chunk_MX, *kv_inputs, start, *block_inputs, CFG, True
            )
        out_ME, max_M, sum_MX = merge_states(out_ME, max_M, sum_MX, chunk_ME, chunk_max_M, chunk_MX)
    return out_ME, max_M, sum_MX


@jit_paged
def prefill_kernel(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    block_table_SP: tl.tensor,
    tiles_I4: tl.tensor,
    visible_ends_T: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out_THe: tl.tensor,
    lse_TH: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    block_table_stride: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    PARTS: tl.constexpr,
    STORE_LSE: tl.constexpr,
) -> None:
    """One head, and M queries of a tile: request slot or first key row, first query, queries, first position."""
    head, tile = tl.program_id(0), tiles_I4 + tl.program_id(1) * 4
    first_query, channel = tl.program_id(2) // PARTS * CFG.M, tl.program_id(2) % PARTS * CFG.E
    count = tl.load(tile + 2) - first_query
    if count > 0:
        key_start, m_M = tl.load(tile).to(tl.int64), tl.arange(0, CFG.M)
        real_M = m_M < count
        row_M = tl.load(tile + 1) + first_query + tl.where(real_M, m_M, 0)
        first = tl.load(tile + 3) + first_query
        end = first + tl.minimum(count, CFG.M)
        high_M = tl.minimum(first + m_M, end - 1)
        low_M = first_visible(high_M, CFG)
        high_M, end = extend_visible(high_M, end, visible_ends_T, row_M, real_M, CFG)
        q_MD = load_rows(q_THd + head * CFG.d, row_M.to(tl.int64) * q_stride, real_M, 0, 1, CFG.d, CFG.D, True)
        k = k_SGd + head // CFG.r * CFG.d
        v = v_SGe + head // CFG.r * CFG.e
        pages = block_table_SP
        if CFG.page_size > 0:
            pages += key_start * block_table_stride
        else:
            k, v = k + key_start * CFG.k_stride, v + key_start * CFG.v_stride
        block_inputs = (end, channel, low_M, high_M, exp2_factor, softcap_factor, softcap)
        begin = first_visible(first, CFG) // CFG.N * CFG.N
        group = head // CFG.r
        scales = (k_scales + group * CFG.page_size, v_scales + group * CFG.page_size)
        out_ME, max_M, sum_MX = attend_chunks(q_MD, k, v, *scales, pages, begin, first, *block_inputs, CFG)
        total_M = tl.max(sum_MX, 1)
        if CFG.has_sinks:
            total_M = add_sink(max_M, total_M, tl.zeros_like(total_M) + tl.load(sinks_H + head).to(tl.float32))
        out_ME = normalize(out_ME, total_M[:, None])
        channel_E = channel + tl.arange(0, CFG.E)
        at_M = row_M.to(tl.int64) * CFG.heads + head
        written_ME = real_M[:, None] & (channel_E < CFG.e)[None, :]
        tl.store(out_THe + at_M[:, None] * CFG.e + channel_E[None, :], out_ME.to(out_THe.dtype.element_ty), written_ME)
        if STORE_LSE:
            tl.store(lse_TH + at_M, (max_M + tl.log2(total_M)) * LN2, mask=real_M & (channel == 0))
