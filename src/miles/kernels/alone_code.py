"""Device code of attention of one row with one new token, from its projection to what its heads saw, in one launch.

Shapes: as in ``tile_code``; G key-value heads of r query heads each, in scratch R >= r of them, S splits of the past, C
of them joined at once.

A program has one key-value head and a part of the past, which it fetches before the projection is ready. The new token
is met by the first of them out of registers, and left in the cache. Who is last of a key-value head joins the parts.

What is read here is little, and the weights that streamed by since the last layer have driven even the code out of the
card's caches: the less code, the sooner it is done. So there is one loop, and nothing of it is written out twice.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import gdc_launch_dependents, gdc_wait, jit, tl
from miles.kernels.prepare import read_rotation, ready_heads
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


@jit
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
    SPLITS: tl.constexpr,
    TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr,
    NARROW: tl.constexpr,
    C: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """What each head of the row saw; the new token lies behind all others, at ``position``."""
    if EARLY:
        gdc_launch_dependents()
    group, split = tl.program_id(0), tl.program_id(1)
    begin, end, splits = share(tl.load(position).to(tl.int32), split, HOW, SPLITS)
    if split < splits:
        # Nothing of this was written by a kernel of this step.
        pages = pages_SP + tl.load(seat).to(tl.int64) * pages_stride
        k, v = k_SGd + group * HOW.d, v_SGd + group * HOW.d
        k_ND, v_ND = read_tile(k, v, pages, begin, end, HOW)
        channel_1D, head_R1 = tl.arange(0, HOW.D)[None, :], tl.arange(0, HOW.R)[:, None]
        cos_1D, sin_1D = read_rotation(rotation, position, 0, channel_1D, TURNED, True)
        there = tl.load(slot).to(tl.int64)
        if EARLY:
            gdc_wait()
        made = channel_1D, cos_1D, sin_1D, q_weight, k_weight, eps, offset
        inside_1D, real_R1 = channel_1D < HOW.d, head_R1 < HOW.r
        asked, from_R1 = (real_R1, real_R1, real_R1 & inside_1D), qkv + (group * HOW.r + head_R1) * HOW.d
        q_MD = fill(ready_heads(from_R1, *asked, *made, HOW.d, TURNED, INTERLEAVED, NORM, NARROW), HOW)
        out_MD, top_M, sum_M = nothing_yet(HOW)
        if split == 0:
            at_11 = qkv + (HOW.heads + group + tl.zeros([1, 1], tl.int32)) * HOW.d
            kept = inside_1D & False, inside_1D | True, inside_1D
            k_1D = ready_heads(at_11, *kept, *made, HOW.d, TURNED, INTERLEAVED, NORM, NARROW)
            out_MD, top_M, sum_M = meet_new(q_MD, k_1D, at_11 + HOW.G * HOW.d, k, v, there, scale, softcap, HOW)
        met = k, v, pages, k_ND, v_ND, begin, end, scale, softcap
        out_MD, top_M, sum_M = look_back(out_MD, top_M, sum_M, q_MD, *met, HOW)
        leave(part_GSRd, sum_GSR, out_MD, top_M, sum_M, group * SPLITS + split, scale, HOW)
        if last(done_G + group, splits):
            join(part_GSRd, sum_GSR, sinks_H, out_Hd, group, splits, HOW, SPLITS, C)


@jit
def last(done: tl.tensor, of: tl.tensor) -> Any:
    """Whether all ``of`` programs have come here, this one as the last; the count is then zero again."""
    # All threads have written before one of them says so.
    tl.debug_barrier()
    is_last = tl.atomic_add(done, 1, sem="acq_rel") == of - 1
    tl.store(done, 0, is_last)
    return is_last


@jit
def meet_new(
    q_MD: tl.tensor,
    k_1D: tl.tensor,
    from_11: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    there: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
) -> Any:
    """Queries meet the new token, whose value is read ``from_11``; it goes where it belongs, if anywhere."""
    channel_1D = tl.arange(0, HOW.D)[None, :]
    inside_1D = channel_1D < HOW.d
    v_1D = tl.load(from_11 + channel_1D, inside_1D, other=0.0)
    tl.store(k + there * HOW.k_stride + channel_1D, k_1D, inside_1D & (there >= 0))
    tl.store(v + there * HOW.v_stride + channel_1D, v_1D, inside_1D & (there >= 0))
    out_MD, top_M, sum_M = nothing_yet(HOW)
    top_M = bound(tl.sum(q_MD.to(tl.float32) * k_1D.to(tl.float32), 1), scale, softcap, HOW)
    return out_MD + v_1D.to(tl.float32), top_M, sum_M + 1.0


@jit
def share(new: tl.tensor, split: tl.tensor, HOW: tl.constexpr, SPLITS: tl.constexpr) -> Any:
    """The tokens before the new one that a program meets, and how many programs meet any; always one."""
    low = lowest_seen(new, HOW)
    part = tl.maximum(tl.cdiv(tl.cdiv(new - low, SPLITS), HOW.N), 1) * HOW.N
    begin = low + split * part
    return begin, tl.minimum(begin + part, new), tl.maximum(tl.cdiv(new - low, part), 1)


@jit
def look_back(
    out_MD: tl.tensor,
    top_M: tl.tensor,
    sum_M: tl.tensor,
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
    """Queries meet tokens [begin, end), of which the first tile is there."""
    for at in range(begin, tl.maximum(end, begin + 1), HOW.N):
        seen_N = at + tl.arange(0, HOW.N) < end
        score_MN = bound(tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee"), scale, softcap, HOW)
        score_MN = tl.where(seen_N[None, :], score_MN, float("-inf"))
        power_MN, shrink_M, top_M, sum_M = weigh(score_MN, top_M, sum_M, exponent(scale, HOW), False)
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
    """Write what a program saw; a query is there several times, and the first of each is written."""
    m_M = tl.arange(0, HOW.M)
    head_M = m_M // (HOW.M // HOW.R)
    once_M = (m_M % (HOW.M // HOW.R) == 0) & (head_M < HOW.r)
    factor = exponent(scale, HOW)
    write_rows(part_GSRd, place * HOW.R + head_M, divide(out_MD, top_M, sum_M, sum_M, factor, False), once_M, HOW)
    tl.store(sum_GSR + place * HOW.R + head_M, top_M * factor + tl.log2(sum_M), mask=once_M)


@jit
def fill(q_RD: tl.tensor, HOW: tl.constexpr) -> Any:
    """Queries as often as fill a tile."""
    R: tl.constexpr = HOW.R
    D: tl.constexpr = HOW.D
    M: tl.constexpr = HOW.M
    return tl.broadcast_to(q_RD[:, None, :], [R, M // R, D]).reshape(M, D)


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
    splits: tl.tensor,
    HOW: tl.constexpr,
    SPLITS: tl.constexpr,
    C: tl.constexpr,
) -> Any:
    """Weigh the parts of one key-value head's queries by their sums; other programs wrote them."""
    R: tl.constexpr = HOW.R
    D: tl.constexpr = HOW.D
    head_R, channel_D = tl.arange(0, R), tl.arange(0, D)
    top_R = tl.full([R], float("-inf"), tl.float32)
    total_R, out_RD = tl.zeros([R], tl.float32), tl.zeros([R, D], tl.float32)
    for at in range(0, splits, C):
        split_C1 = (at + tl.arange(0, C))[:, None]
        place_CR = (group * SPLITS + split_C1) * R + head_R[None, :]
        seen_CR = (split_C1 < splits) & (head_R >= 0)[None, :]
        # Not from a cache of this processor's own.
        sum_CR = tl.load(sum_GSR + place_CR, seen_CR, other=float("-inf"), cache_modifier=".cg")
        at_CRD = place_CR[:, :, None] * HOW.d + channel_D[None, None, :]
        seen_CRD = seen_CR[:, :, None] & (channel_D < HOW.d)[None, None, :] if HOW.d < D else seen_CR[:, :, None]
        part_CRD = tl.load(part_GSRd + at_CRD, seen_CRD, other=0.0, cache_modifier=".cg")
        new_R = tl.maximum(top_R, tl.max(sum_CR, 0))
        weight_CR, shrink_R = tl.exp2(sum_CR - new_R[None, :]), tl.exp2(top_R - new_R)
        out_RD = out_RD * shrink_R[:, None] + tl.sum(part_CRD * weight_CR[:, :, None], 0)
        total_R, top_R = total_R * shrink_R + tl.sum(weight_CR, 0), new_R
    if HOW.sunk:
        sink_R = tl.load(sinks_H + group * HOW.r + head_R, mask=head_R < HOW.r, other=0.0).to(tl.float32)
        total_R += tl.exp2(sink_R * LOG2E - top_R)
    at_RD = out_Hd + (group * HOW.r + head_R)[:, None] * HOW.d + channel_D[None, :]
    inside_RD = (head_R < HOW.r)[:, None] & (channel_D < HOW.d)[None, :]
    tl.store(at_RD, (out_RD / total_R[:, None]).to(out_Hd.dtype.element_ty), inside_RD)
