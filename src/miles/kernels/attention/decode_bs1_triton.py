"""Triton kernel of batch-size-1 decode attention, from the QKV projection to the output of all heads in one launch.

Shapes: as in ``tiles_triton``; G key-value heads of r query heads each (in scratch R >= r), S splits, C of them reduced
at once. Q >= R query rows are prepared, each repeated so that every warp has whole rows; everything combined with them
is loaded in the same shape, so that no data moves between threads.

A program has one key-value head and one split of the past, which it loads before the projection is ready. The new token
is a split of its own, the first: the first program attends to it from registers and writes it to the KV cache. The last
program of a key-value head to finish reduces the splits.

The data is small, and the weights streamed since the previous layer have evicted even the instructions from the caches:
the less code, the faster. So there is one loop, and nothing is unrolled or duplicated.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.attention.tiles_triton import (
    LOG2E,
    apply_softcap,
    exp2_factor,
    exponents_with_scales,
    find_slots,
    first_visible,
    init_state,
    load_rows,
    load_scales,
    narrow_queries,
    normalize,
    online_softmax,
    online_softmax_with_scales,
    score_factor,
    store_rows,
)
from miles.kernels.fused.kv_cache_fp8 import decode_e4m3, dequantize_rows, quantize_rows, scale_offset
from miles.kernels.fused.qk_norm_rope import load_heads, load_norm_weights, load_rotation, norm_and_rotate
from miles.kernels.runtime.triton_compat import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl


@jit_paged
def decode_bs1_kernel(
    qkv: tl.tensor,
    k_SGd: tl.tensor,
    v_SGd: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    block_table_SP: tl.tensor,
    req_slot: tl.tensor,
    slot: tl.tensor,
    start: tl.tensor,
    position: tl.tensor,
    rotation: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    sinks_H: tl.tensor,
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    done_G: tl.tensor,
    out_Hd: tl.tensor,
    block_table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    CFG: tl.constexpr,
    SPLITS: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    ROUND_NORM: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Attention of every head of the row; the new token is behind ``start`` others, and rotated to ``position``."""
    if PDL:
        gdc_launch_dependents()
    group, split = tl.program_id(0), tl.program_id(1)
    position_new = tl.load(position).to(tl.int64)
    begin, end, splits = split_range(tl.load(start).to(tl.int32), split, CFG, SPLITS - 1)
    if split < splits:
        # None of these loads depends on a kernel that may still be running.
        first, first_split = split == 0, group * SPLITS
        rope, q_scales, k_scales = load_rope_and_norms(
            rotation, position_new, q_weight, k_weight, first, CFG, ROTARY_DIM, INTERLEAVED, NORM, Q
        )
        pages = block_table_SP + tl.load(req_slot).to(tl.int64) * block_table_stride
        k, v = k_SGd + group * CFG.d, v_SGd + group * CFG.d
        kv_scales = key_scales + group * CFG.page_size, value_scales + group * CFG.page_size
        k_ND, v_ND, k_scale_N, v_scale_N = load_kv_tile(k, v, *kv_scales, pages, begin, end, CFG)
        out_slot = tl.load(slot).to(tl.int64)
        if PDL:
            gdc_wait()
        q_loaded, k_loaded, v_1D = load_new_token(qkv, group, first, CFG, ROTARY_DIM, INTERLEAVED, Q)
        q_QD = norm_and_rotate(*q_loaded, *rope, *q_scales, eps, offset, CFG.d, ROTARY_DIM, NORM, ROUND_NORM)
        # Left to where it is used, the compiler would load the key only after the queries are ready.
        k_QD = norm_and_rotate(*k_loaded, *rope, *k_scales, eps, offset, CFG.d, ROTARY_DIM, NORM, ROUND_NORM)
        if CFG.fp8:
            # The new token is attended to as the cache returns it.
            k_code_QD, k_scale_Q1, k_QD = quantize_rows(k_QD)
            v_code_1D, v_scale_11, v_1D = quantize_rows(v_1D)
            if first:
                store_kv(k, v, out_slot, k_code_QD, v_code_1D, CFG, Q)
                store_scales(*kv_scales, out_slot, k_scale_Q1, v_scale_11, CFG, Q)
        elif first:
            store_kv(k, v, out_slot, k_QD, v_1D, CFG, Q)
        if first:
            store_new_partial(part_GSRd, sum_GSR, q_QD, k_QD, v_1D, first_split, scale, softcap, CFG, Q)
        kv_inputs = pages, k_ND, v_ND, k_scale_N, v_scale_N, begin, end, scale, softcap
        out_MD, max_M, sum_M = attend_past(repeat_queries(q_QD, CFG, Q), k, v, *kv_scales, *kv_inputs, CFG)
        store_partial(part_GSRd, sum_GSR, out_MD, max_M, sum_M, first_split + 1 + split, scale, CFG)
        if is_last_program(done_G + group, splits):
            reduce_partials(part_GSRd, sum_GSR, sinks_H, out_Hd, group, first_split, 1 + splits, CFG, C)


@jit
def is_last_program(done: tl.tensor, total: tl.tensor) -> Any:
    """Whether all ``total`` programs have arrived, this one last; resets the counter to zero."""
    # All threads must have written before one of them increments the counter.
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel") == total - 1
    tl.store(done, 0, is_last)
    return is_last


@jit
def load_rope_and_norms(
    rotation: tl.tensor,
    position_new: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    first: tl.tensor,
    CFG: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    Q: tl.constexpr,
) -> Any:
    """Rotation masks, cosines and sines, and the norm weights of queries and (in the ``first`` program) the key."""
    channel_QD = tl.arange(0, CFG.D)[None, :] + tl.zeros([Q, 1], tl.int32)
    inside_QD, turned_QD = channel_QD < CFG.d, channel_QD < ROTARY_DIM
    cos_QD, sin_QD = load_rotation(rotation, None, position_new, channel_QD, ROTARY_DIM, False)
    q_scales = load_norm_weights(q_weight, channel_QD, inside_QD, turned_QD, ROTARY_DIM, INTERLEAVED, NORM)
    k_scales = load_norm_weights(
        k_weight, channel_QD, inside_QD & first, turned_QD & first, ROTARY_DIM, INTERLEAVED, NORM
    )
    return (inside_QD, turned_QD, cos_QD, sin_QD), q_scales, k_scales


@jit
def load_new_token(
    qkv: tl.tensor,
    group: tl.tensor,
    first: tl.tensor,
    CFG: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q: tl.constexpr,
) -> Any:
    """Issue all loads of the new token at once: queries and, in the ``first`` program, its key and value."""
    head_Q1, channel_1D = tl.arange(0, Q)[:, None] // (Q // CFG.R), tl.arange(0, CFG.D)[None, :]
    inside_1D = channel_1D < CFG.d
    turned_1D = channel_1D < ROTARY_DIM
    real_Q1 = head_Q1 < CFG.r
    q_Q1 = qkv + (group * CFG.r + head_Q1) * CFG.d
    k_Q1 = qkv + (CFG.heads + group + head_Q1 * 0) * CFG.d
    q_loaded = load_heads(q_Q1, channel_1D, inside_1D & real_Q1, turned_1D & real_Q1, ROTARY_DIM, INTERLEAVED)
    k_loaded = load_heads(k_Q1, channel_1D, inside_1D & first, turned_1D & first, ROTARY_DIM, INTERLEAVED)
    v_1D = tl.load(qkv + (CFG.heads + CFG.G + group) * CFG.d + channel_1D, inside_1D & first, other=0.0)
    return q_loaded, k_loaded, v_1D


@jit
def store_kv(
    k: tl.tensor,
    v: tl.tensor,
    out_slot: tl.tensor,
    k_QD: tl.tensor,
    v_1D: tl.tensor,
    CFG: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Write the new token to its KV-cache slot, unless that is negative."""
    channel_1D, row_Q1 = tl.arange(0, CFG.D)[None, :], tl.arange(0, Q)[:, None]
    stored_1D = (channel_1D < CFG.d) & (out_slot >= 0)
    tl.store(k + out_slot * CFG.k_stride + channel_1D + row_Q1 * 0, k_QD, stored_1D & (row_Q1 == 0))
    tl.store(v + out_slot * CFG.v_stride + channel_1D, v_1D, stored_1D)


@jit
def store_scales(
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out_slot: tl.tensor,
    k_scale_Q1: tl.tensor,
    v_scale_11: tl.tensor,
    CFG: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Write the scales of the new token beside its KV-cache slot, unless that is negative."""
    row_Q1, at = tl.arange(0, Q)[:, None], scale_offset(out_slot, CFG.page_size, CFG.G)
    tl.store(k_scales + at + row_Q1 * 0, k_scale_Q1, (row_Q1 == 0) & (out_slot >= 0))
    tl.store(v_scales + at + tl.zeros([1, 1], tl.int32), v_scale_11, out_slot + tl.zeros([1, 1], tl.int32) >= 0)


@jit
def store_new_partial(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    q_QD: tl.tensor,
    k_QD: tl.tensor,
    v_1D: tl.tensor,
    first_split: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Store the new token as a split of its own: its value once for all queries, and each query's score."""
    row_Q1, channel_1D = tl.arange(0, Q)[:, None], tl.arange(0, CFG.D)[None, :]
    score_Q1 = apply_softcap(tl.sum(q_QD.to(tl.float32) * k_QD.to(tl.float32), 1, keep_dims=True), scale, softcap, CFG)
    at_Q1 = sum_GSR + first_split * CFG.R + row_Q1 // (Q // CFG.R)
    tl.store(at_Q1, score_Q1 * score_factor(scale, CFG), row_Q1 % (Q // CFG.R) == 0)
    tl.store(part_GSRd + first_split * CFG.R * CFG.d + channel_1D, v_1D.to(tl.float32), channel_1D < CFG.d)


@jit
def split_range(position_new: tl.tensor, split: tl.tensor, CFG: tl.constexpr, SPLITS: tl.constexpr) -> Any:
    """The past tokens [begin, end) of a program, and the number of programs that have any (at least one)."""
    low = first_visible(position_new, CFG)
    part_size = tl.maximum(tl.cdiv(tl.cdiv(position_new - low, SPLITS), CFG.N), 1) * CFG.N
    begin = low + split * part_size
    return begin, tl.minimum(begin + part_size, position_new), tl.maximum(tl.cdiv(position_new - low, part_size), 1)


@jit
def attend_past(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    k_ND: tl.tensor,
    v_ND: tl.tensor,
    k_scale_N: tl.tensor,
    v_scale_N: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """Attend to tokens [begin, end), of which the first tile is already loaded; the range may be empty."""
    out_MD, _, max_M, sum_M = init_state(CFG)
    if CFG.fp16_dots:
        q_MD = narrow_queries(q_MD)
    for start in range(begin, tl.maximum(end, begin + 1), CFG.N):
        valid_1N = (start + tl.arange(0, CFG.N) < end)[None, :]
        if CFG.fp16_dots:
            k_ND, v_ND = decode_e4m3(k_ND, tl.float16, CFG.native_fp8), decode_e4m3(v_ND, tl.float16, CFG.native_fp8)
            score_MN = tl.dot(q_MD, tl.trans(k_ND))
            score_MN, inverse_N = exponents_with_scales(score_MN, k_scale_N, v_scale_N, scale, softcap, CFG)
            score_MN = tl.where(valid_1N, score_MN, float("-inf"))
            p_MN, rescale_M, max_M, sum_M = online_softmax_with_scales(score_MN, inverse_N, max_M, sum_M, True)
        else:
            if CFG.fp8:
                k_ND = dequantize_rows(k_ND, k_scale_N, q_MD.dtype, CFG.native_fp8)
                v_ND = dequantize_rows(v_ND, v_scale_N, q_MD.dtype, CFG.native_fp8)
            score_MN = apply_softcap(tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee"), scale, softcap, CFG)
            score_MN = tl.where(valid_1N, score_MN, float("-inf"))
            p_MN, rescale_M, max_M, sum_M = online_softmax(score_MN, max_M, sum_M, exp2_factor(scale, CFG), True)
        out_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, out_MD * rescale_M[:, None], input_precision="ieee")
        k_ND, v_ND, k_scale_N, v_scale_N = load_kv_tile(k, v, k_scales, v_scales, pages, start + CFG.N, end, CFG)
    return out_MD, max_M, sum_M


@jit
def store_partial(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    out_MD: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    first_split: tl.tensor,
    scale: tl.tensor,
    CFG: tl.constexpr,
) -> None:
    """Store a program's partial result; a query is repeated in the tile, and its first copy is stored."""
    m_M = tl.arange(0, CFG.M)
    head_M = m_M // (CFG.M // CFG.R)
    first_copy_M = (m_M % (CFG.M // CFG.R) == 0) & (head_M < CFG.r)
    factor = exp2_factor(scale, CFG)
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    store_rows(
        part_GSRd,
        first_split * CFG.R + head_M,
        normalize(out_MD, max_M, sum_M, sum_M, factor, False),
        first_copy_M,
        CFG,
    )
    tl.store(sum_GSR + first_split * CFG.R + head_M, max_M * factor + tl.log2(sum_M), mask=first_copy_M)


@jit
def repeat_queries(q_QD: tl.tensor, CFG: tl.constexpr, Q: tl.constexpr) -> Any:
    """Repeat the queries to fill a tile."""
    M: tl.constexpr = CFG.M
    D: tl.constexpr = CFG.D
    return tl.broadcast_to(q_QD.reshape(Q, 1, D), [Q, M // Q, D]).reshape(M, D)


@jit
def load_kv_tile(
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """Keys and values of tokens from ``start`` on, and their scales if they are FP8; zeros from ``end`` on."""
    token_N = start + tl.arange(0, CFG.N)
    slot_N, valid_N = find_slots(pages, token_N, end, CFG), token_N < end
    k_ND = load_rows(k, slot_N, CFG.k_stride, valid_N, CFG.d, CFG.D, True)
    v_ND = load_rows(v, slot_N, CFG.v_stride, valid_N, CFG.d, CFG.D, True)
    N: tl.constexpr = CFG.N
    k_scale_N, v_scale_N = tl.full([N], 1.0, tl.float32), tl.full([N], 1.0, tl.float32)
    if CFG.fp8:
        k_scale_N = load_scales(k_scales, slot_N, valid_N, CFG)
        v_scale_N = load_scales(v_scales, slot_N, valid_N, CFG)
    return k_ND, v_ND, k_scale_N, v_scale_N


@jit
def reduce_partials(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    sinks_H: tl.tensor,
    out_Hd: tl.tensor,
    group: tl.tensor,
    first_split: tl.tensor,
    num_splits: tl.tensor,
    CFG: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Combine the splits of one key-value head's queries, weighted by their sums of exponentials."""
    R: tl.constexpr = CFG.R
    D: tl.constexpr = CFG.D
    head_R1, channel_11D = tl.arange(0, R)[:, None], tl.arange(0, D)[None, None, :]
    inside_R1D = (head_R1 < CFG.r)[:, :, None] & (channel_11D < CFG.d)
    max_R1, total_R1 = tl.full([R, 1], float("-inf"), tl.float32), tl.zeros([R, 1], tl.float32)
    if CFG.has_sinks:
        max_R1 = tl.load(sinks_H + group * CFG.r + head_R1, head_R1 < CFG.r, other=0.0).to(tl.float32) * LOG2E
        total_R1 += 1.0
    out_R1D = tl.zeros([R, 1, D], tl.float32)
    for start in range(0, num_splits, C):
        split_1C = (start + tl.arange(0, C))[None, :]
        # Other programs wrote these: bypass the L1 cache.
        at_RC, valid_RC = (first_split + split_1C) * R + head_R1, (split_1C < num_splits) & (head_R1 >= 0)
        sum_RC = tl.load(sum_GSR + at_RC, valid_RC, other=float("-inf"), cache_modifier=".cg")
        at_RC = (first_split + split_1C) * R + tl.where(split_1C == 0, 0, head_R1)
        at_RCD = part_GSRd + (at_RC * CFG.d)[:, :, None] + channel_11D
        partial_RCD = tl.load(at_RCD, valid_RC[:, :, None] & inside_R1D, other=0.0, cache_modifier=".cg")
        new_max_R1 = tl.maximum(max_R1, tl.max(sum_RC, 1, keep_dims=True))
        weight_RC, rescaled_R1 = tl.exp2(sum_RC - new_max_R1), total_R1 * tl.exp2(max_R1 - new_max_R1)
        total_R1, max_R1 = rescaled_R1 + tl.sum(weight_RC, 1, keep_dims=True), new_max_R1
        # Normalize inside the loop, where the sums are in the threads that hold the partial results.
        weighted_R1D = tl.sum(partial_RCD * weight_RC[:, :, None], 1, keep_dims=True)
        out_R1D = (out_R1D * rescaled_R1[:, :, None] + weighted_R1D) / total_R1[:, :, None]
    at_R1D = out_Hd + ((group * CFG.r + head_R1) * CFG.d)[:, :, None] + channel_11D
    tl.store(at_R1D, out_R1D.to(out_Hd.dtype.element_ty), inside_R1D)
