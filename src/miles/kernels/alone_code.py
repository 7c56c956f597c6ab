"""Device code of attention of one row with one new token, from its projection to what its heads saw, in one launch.

Shapes: as in ``tile_code``; G key-value heads of r query heads each, in scratch R >= r of them, S parts of what they
see, C of them joined at once. Q >= R rows of queries are made ready, each as often as it takes for a warp to have whole
rows; all that meets them is read in their shape, so that nothing passes from one thread to another.

A program has one key-value head and a part of the past, which it fetches before the projection is ready. The new token
is a part of its own, the first: the first program meets it out of registers, and leaves it in the cache. Who is last of
a key-value head joins the parts.

What is read here is little, and the weights that streamed by since the last layer have driven even the code out of the
card's caches: the less code, the sooner it is done. So there is one loop, and nothing of it is written out twice.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import gdc_launch_dependents, gdc_wait, jit, jit_paged, tl
from miles.kernels.prepare import read_heads, read_rotation, read_scales, ready_heads
from miles.kernels.tile_code import (
    LOG2E,
    bound,
    divide,
    exponent,
    find_slots,
    lowest_seen,
    nothing_yet,
    read_rows,
    weigh,
    write_rows,
)


@jit_paged
def attend_alone(
    qkv: tl.tensor,
    k_SGd: tl.tensor,
    v_SGd: tl.tensor,
    pages_SP: tl.tensor,
    seat: tl.tensor,
    slot: tl.tensor,
    position: tl.tensor,
    rotation: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    sinks_H: tl.tensor,
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    done_G: tl.tensor,
    out_Hd: tl.tensor,
    pages_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    HOW: tl.constexpr,
    PARTS: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
    C: tl.constexpr,
    Q: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """What each head of the row saw; the new token lies behind all others, at ``position``."""
    if EARLY:
        gdc_launch_dependents()
    group, split = tl.program_id(0), tl.program_id(1)
    new = tl.load(position).to(tl.int64)
    begin, end, splits = share(new.to(tl.int32), split, HOW, PARTS - 1)
    if split < splits:
        # Nothing of this is written by a launch that may still be under way.
        first, place = split == 0, group * PARTS
        turn, q_scales, k_scales = terms(rotation, new, q_weight, k_weight, first, HOW, TURNED, INTERLEAVED, NORM, Q)
        pages = pages_SP + tl.load(seat).to(tl.int64) * pages_stride
        k, v = k_SGd + group * HOW.d, v_SGd + group * HOW.d
        k_ND, v_ND = read_tile(k, v, pages, begin, end, HOW)
        there = tl.load(slot).to(tl.int64)
        if EARLY:
            gdc_wait()
        q_read, k_read, v_1D = read_new(qkv, group, first, HOW, TURNED, INTERLEAVED, Q)
        q_QD = ready_heads(*q_read, *turn, *q_scales, eps, offset, HOW.d, TURNED, NORM, NARROW)
        # Were this left to those who need it, the compiler would have the key read when queries are ready.
        k_QD = ready_heads(*k_read, *turn, *k_scales, eps, offset, HOW.d, TURNED, NORM, NARROW)
        if first:
            keep_new(k, v, there, k_QD, v_1D, HOW, Q)
            leave_new(part_GSRd, sum_GSR, q_QD, k_QD, v_1D, place, scale, softcap, HOW, Q)
        met = k, v, pages, k_ND, v_ND, begin, end, scale, softcap
        out_MD, top_M, sum_M = look_back(fill(q_QD, HOW, Q), *met, HOW)
        leave(part_GSRd, sum_GSR, out_MD, top_M, sum_M, place + 1 + split, scale, HOW)
        if last(done_G + group, splits):
            join(part_GSRd, sum_GSR, sinks_H, out_Hd, group, place, 1 + splits, HOW, C)


@jit
def last(done: tl.tensor, of: tl.tensor) -> Any:
    """Whether all ``of`` programs have come here, this one as the last; the count is then zero again."""
    # All threads have written before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel") == of - 1
    tl.store(done, 0, is_last)
    return is_last


@jit
def terms(
    rotation: tl.tensor,
    new: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    first: tl.tensor,
    HOW: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    Q: tl.constexpr,
) -> Any:
    """Which channels turn and how, and the norms' weights for queries and, in the ``first`` program, the key."""
    channel_QD = tl.arange(0, HOW.D)[None, :] + tl.zeros([Q, 1], tl.int32)
    inside_QD, turned_QD = channel_QD < HOW.d, channel_QD < TURNED
    cos_QD, sin_QD = read_rotation(rotation, None, new, channel_QD, TURNED, False)
    q_scales = read_scales(q_weight, channel_QD, inside_QD, turned_QD, TURNED, INTERLEAVED, NORM)
    k_scales = read_scales(k_weight, channel_QD, inside_QD & first, turned_QD & first, TURNED, INTERLEAVED, NORM)
    return (inside_QD, turned_QD, cos_QD, sin_QD), q_scales, k_scales


@jit
def read_new(
    qkv: tl.tensor,
    group: tl.tensor,
    first: tl.tensor,
    HOW: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    Q: tl.constexpr,
) -> Any:
    """The new token, all of it asked for at once: queries, and in the ``first`` program its key and value."""
    head_Q1, channel_1D = tl.arange(0, Q)[:, None] // (Q // HOW.R), tl.arange(0, HOW.D)[None, :]
    inside_1D, turned_1D, real_Q1 = channel_1D < HOW.d, channel_1D < TURNED, head_Q1 < HOW.r
    q_Q1 = qkv + (group * HOW.r + head_Q1) * HOW.d
    k_Q1 = qkv + (HOW.heads + group + head_Q1 * 0) * HOW.d
    q_read = read_heads(q_Q1, channel_1D, inside_1D & real_Q1, turned_1D & real_Q1, TURNED, INTERLEAVED)
    k_read = read_heads(k_Q1, channel_1D, inside_1D & first, turned_1D & first, TURNED, INTERLEAVED)
    v_1D = tl.load(qkv + (HOW.heads + HOW.G + group) * HOW.d + channel_1D, inside_1D & first, other=0.0)
    return q_read, k_read, v_1D


@jit
def keep_new(
    k: tl.tensor,
    v: tl.tensor,
    there: tl.tensor,
    k_QD: tl.tensor,
    v_1D: tl.tensor,
    HOW: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """The new token goes where it belongs, if anywhere."""
    channel_1D, row_Q1 = tl.arange(0, HOW.D)[None, :], tl.arange(0, Q)[:, None]
    kept_1D = (channel_1D < HOW.d) & (there >= 0)
    tl.store(k + there * HOW.k_stride + channel_1D + row_Q1 * 0, k_QD, kept_1D & (row_Q1 == 0))
    tl.store(v + there * HOW.v_stride + channel_1D, v_1D, kept_1D)


@jit
def leave_new(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    q_QD: tl.tensor,
    k_QD: tl.tensor,
    v_1D: tl.tensor,
    place: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
    Q: tl.constexpr,
) -> None:
    """Write the new token as a part of its own: its value once for all queries, and how much each sees of it."""
    row_Q1, channel_1D = tl.arange(0, Q)[:, None], tl.arange(0, HOW.D)[None, :]
    score_Q1 = bound(tl.sum(q_QD.to(tl.float32) * k_QD.to(tl.float32), 1, keep_dims=True), scale, softcap, HOW)
    at_Q1 = sum_GSR + place * HOW.R + row_Q1 // (Q // HOW.R)
    tl.store(at_Q1, score_Q1 * exponent(scale, HOW), row_Q1 % (Q // HOW.R) == 0)
    tl.store(part_GSRd + place * HOW.R * HOW.d + channel_1D, v_1D.to(tl.float32), channel_1D < HOW.d)


@jit
def share(new: tl.tensor, split: tl.tensor, HOW: tl.constexpr, SPLITS: tl.constexpr) -> Any:
    """The tokens before the new one that a program meets, and how many programs meet any; always one."""
    low = lowest_seen(new, HOW)
    part = tl.maximum(tl.cdiv(tl.cdiv(new - low, SPLITS), HOW.N), 1) * HOW.N
    begin = low + split * part
    return begin, tl.minimum(begin + part, new), tl.maximum(tl.cdiv(new - low, part), 1)


@jit
def look_back(
    q_MD: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    k_ND: tl.tensor,
    v_ND: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
) -> Any:
    """Queries meet tokens [begin, end), of which the first tile is there; there may be none."""
    out_MD, top_M, sum_M = nothing_yet(HOW)
    for at in range(begin, tl.maximum(end, begin + 1), HOW.N):
        seen_N = at + tl.arange(0, HOW.N) < end
        score_MN = bound(tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee"), scale, softcap, HOW)
        score_MN = tl.where(seen_N[None, :], score_MN, float("-inf"))
        power_MN, shrink_M, top_M, sum_M = weigh(score_MN, top_M, sum_M, exponent(scale, HOW), True)
        out_MD = tl.dot(power_MN.to(v_ND.dtype), v_ND, out_MD * shrink_M[:, None], input_precision="ieee")
        k_ND, v_ND = read_tile(k, v, pages, at + HOW.N, end, HOW)
    return out_MD, top_M, sum_M


@jit
def leave(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    out_MD: tl.tensor,
    top_M: tl.tensor,
    sum_M: tl.tensor,
    place: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
) -> None:
    """Write what a program saw, if anything; a query is there several times, and the first of each is written."""
    m_M = tl.arange(0, HOW.M)
    head_M = m_M // (HOW.M // HOW.R)
    once_M = (m_M % (HOW.M // HOW.R) == 0) & (head_M < HOW.r)
    factor = exponent(scale, HOW)
    sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    write_rows(part_GSRd, place * HOW.R + head_M, divide(out_MD, top_M, sum_M, sum_M, factor, False), once_M, HOW)
    tl.store(sum_GSR + place * HOW.R + head_M, top_M * factor + tl.log2(sum_M), mask=once_M)


@jit
def fill(q_QD: tl.tensor, HOW: tl.constexpr, Q: tl.constexpr) -> Any:
    """Queries as often as fill a tile."""
    M: tl.constexpr = HOW.M
    D: tl.constexpr = HOW.D
    return tl.broadcast_to(q_QD.reshape(Q, 1, D), [Q, M // Q, D]).reshape(M, D)


@jit
def read_tile(k: tl.tensor, v: tl.tensor, pages: tl.tensor, at: tl.tensor, end: tl.tensor, HOW: tl.constexpr) -> Any:
    """Keys and values of tokens from ``at`` on; zeros from ``end`` on."""
    token_N = at + tl.arange(0, HOW.N)
    slot_N, seen_N = find_slots(pages, token_N, end, HOW), token_N < end
    k_ND = read_rows(k, slot_N, HOW.k_stride, seen_N, HOW.d, HOW.D, True)
    return k_ND, read_rows(v, slot_N, HOW.v_stride, seen_N, HOW.d, HOW.D, True)


@jit
def join(
    part_GSRd: tl.tensor,
    sum_GSR: tl.tensor,
    sinks_H: tl.tensor,
    out_Hd: tl.tensor,
    group: tl.tensor,
    place: tl.tensor,
    parts: tl.tensor,
    HOW: tl.constexpr,
    C: tl.constexpr,
) -> None:
    """Weigh the parts of one key-value head's queries by their sums; other programs wrote them."""
    R: tl.constexpr = HOW.R
    D: tl.constexpr = HOW.D
    head_R1, channel_11D = tl.arange(0, R)[:, None], tl.arange(0, D)[None, None, :]
    inside_R1D = (head_R1 < HOW.r)[:, :, None] & (channel_11D < HOW.d)
    top_R1, total_R1 = tl.full([R, 1], float("-inf"), tl.float32), tl.zeros([R, 1], tl.float32)
    if HOW.sunk:
        top_R1 = tl.load(sinks_H + group * HOW.r + head_R1, head_R1 < HOW.r, other=0.0).to(tl.float32) * LOG2E
        total_R1 += 1.0
    out_R1D = tl.zeros([R, 1, D], tl.float32)
    for at in range(0, parts, C):
        part_1C = (at + tl.arange(0, C))[None, :]
        # Not from a cache of this processor's own.
        at_RC, seen_RC = (place + part_1C) * R + head_R1, (part_1C < parts) & (head_R1 >= 0)
        sum_RC = tl.load(sum_GSR + at_RC, seen_RC, other=float("-inf"), cache_modifier=".cg")
        at_RC = (place + part_1C) * R + tl.where(part_1C == 0, 0, head_R1)
        at_RCD = part_GSRd + (at_RC * HOW.d)[:, :, None] + channel_11D
        part_RCD = tl.load(at_RCD, seen_RC[:, :, None] & inside_R1D, other=0.0, cache_modifier=".cg")
        new_R1 = tl.maximum(top_R1, tl.max(sum_RC, 1, keep_dims=True))
        weight_RC, before_R1 = tl.exp2(sum_RC - new_R1), total_R1 * tl.exp2(top_R1 - new_R1)
        total_R1, top_R1 = before_R1 + tl.sum(weight_RC, 1, keep_dims=True), new_R1
        # Divided here, where sums lie with the threads that have the parts; behind the loop they would be moved.
        seen_R1D = tl.sum(part_RCD * weight_RC[:, :, None], 1, keep_dims=True)
        out_R1D = (out_R1D * before_R1[:, :, None] + seen_R1D) / total_R1[:, :, None]
    at_R1D = out_Hd + ((group * HOW.r + head_R1) * HOW.d)[:, :, None] + channel_11D
    tl.store(at_R1D, out_R1D.to(out_Hd.dtype.element_ty), inside_R1D)
