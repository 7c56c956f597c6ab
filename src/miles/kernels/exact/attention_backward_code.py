"""Device code of a trainer's attention, backward: one pass over keys and one over queries, each sum in one order.

Shapes: M queries and N keys of a tile, D channels of a key, E of a value, P some of either; T queries, H = G * r query
heads, I tiles of queries, J tiles of keys. HOW: see ``tiling``.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import jit, tl
from miles.kernels.exact.attention_code import LOG2E, bound, read
from miles.kernels.tile_code import lowest_seen


@jit
def zeros(M: tl.constexpr, D: tl.constexpr) -> Any:
    """A sum of nothing."""
    return tl.zeros([M, D], tl.float32)


@jit
def sum_products(grad: tl.tensor, out: tl.tensor, delta_TH: tl.tensor, rows: tl.tensor, HOW: tl.constexpr) -> None:
    """What gradients and results have in common, a row a head of a token."""
    row_M, channel_E = tl.program_id(0) * HOW.M + tl.arange(0, HOW.M), tl.arange(0, HOW.E)
    at_ME = row_M.to(tl.int64)[:, None] * HOW.e + channel_E[None, :]
    seen_ME = (row_M < rows)[:, None] & (channel_E < HOW.e)[None, :]
    grad_ME = tl.load(grad + at_ME, mask=seen_ME, other=0.0).to(tl.float32)
    out_ME = tl.load(out + at_ME, mask=seen_ME, other=0.0).to(tl.float32)
    tl.store(delta_TH + row_M, tl.sum(grad_ME * out_ME, 1), mask=row_M < rows)


@jit
def slopes(
    score: tl.tensor, lse: tl.tensor, factor: tl.tensor, bend: tl.tensor, cap: tl.tensor, HOW: tl.constexpr
) -> Any:
    """Shares of weight by scores, and how much a bounded score moves with the one under its bound."""
    score = bound(score, bend, cap, HOW)
    bent = score
    if HOW.capped:
        bent = 1.0 - (score / cap) * (score / cap)
    return tl.exp2(score * factor - lse), bent


@jit
def over_keys(
    dq_MD: tl.tensor,
    q_MD: tl.tensor,
    grad_ME: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lse_M: tl.tensor,
    delta_M: tl.tensor,
    at: tl.tensor,
    end: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Queries and the keys at positions ``at`` to ``at + N``."""
    token_N = at + tl.arange(0, HOW.N)
    k_ND = read(k, token_N, token_N < end, 0, HOW.k_stride, HOW.d, HOW.D, MASKED)
    v_NE = read(v, token_N, token_N < end, 0, HOW.v_stride, HOW.e, HOW.E, MASKED)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    power_MN, bent_MN = slopes(score_MN, lse_M[:, None], factor, bend, cap, HOW)
    if MASKED:
        seen_MN = token_N[None, :] <= high_M[:, None]
        if HOW.short:
            seen_MN = seen_MN & (token_N[None, :] >= low_M[:, None])
        power_MN = tl.where(seen_MN, power_MN, 0.0)
    slope_MN = power_MN * (tl.dot(grad_ME, tl.trans(v_NE), input_precision="ieee") - delta_M[:, None])
    if HOW.capped:
        slope_MN = slope_MN * bent_MN
    return tl.dot(slope_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")


@jit
def queries_backward(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    grad_THe: tl.tensor,
    lse_TH: tl.tensor,
    delta_TH: tl.tensor,
    tiles_I4: tl.tensor,
    dq_THd: tl.tensor,
    q_stride: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
) -> None:
    """One head, and M queries of a tile; tiles as in the forward."""
    head, tile, skipped = tl.program_id(0), tiles_I4 + tl.program_id(1) * 4, tl.program_id(2) * HOW.M
    count = tl.load(tile + 2) - skipped
    if count > 0:
        place, m_M = tl.load(tile).to(tl.int64), tl.arange(0, HOW.M)
        real_M = m_M < count
        row_M = (tl.load(tile + 1) + skipped + tl.where(real_M, m_M, 0)).to(tl.int64)
        first = tl.load(tile + 3) + skipped
        end = first + tl.minimum(count, HOW.M)
        high_M = tl.minimum(first + m_M, end - 1)
        low_M = lowest_seen(high_M, HOW)
        at_M = row_M * HOW.heads + head
        q_MD = read(q_THd + head * HOW.d, row_M * q_stride, real_M, 0, 1, HOW.d, HOW.D, True)
        grad_ME = read(grad_THe, at_M, real_M, 0, HOW.e, HOW.e, HOW.E, True)
        lse_M = tl.load(lse_TH + at_M, mask=real_M, other=0.0) * LOG2E
        delta_M = tl.load(delta_TH + at_M, mask=real_M, other=0.0)
        k = k_SGd + head // HOW.r * HOW.d + place * HOW.k_stride
        v = v_SGe + head // HOW.r * HOW.e + place * HOW.v_stride
        told = (end, low_M, high_M, factor, bend, cap)
        begin = lowest_seen(first, HOW) // HOW.N * HOW.N
        whole = begin if HOW.short else (first + 1) // HOW.N * HOW.N
        dq_MD = zeros(HOW.M, HOW.D)
        for at in range(begin, whole, HOW.N):
            dq_MD = over_keys(dq_MD, q_MD, grad_ME, k, v, lse_M, delta_M, at, *told, HOW, False)
        for at in range(whole, end, HOW.N):
            dq_MD = over_keys(dq_MD, q_MD, grad_ME, k, v, lse_M, delta_M, at, *told, HOW, True)
        channel_D = tl.arange(0, HOW.D)
        written_MD = real_M[:, None] & (channel_D < HOW.d)[None, :]
        dq_MD = (dq_MD * scale).to(dq_THd.dtype.element_ty)
        tl.store(dq_THd + at_M[:, None] * HOW.d + channel_D[None, :], dq_MD, mask=written_MD)


@jit
def over_queries(
    dk_NP: tl.tensor,
    dv_NP: tl.tensor,
    k_ND: tl.tensor,
    v_NE: tl.tensor,
    q: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    at: tl.tensor,
    past: tl.tensor,
    high: tl.tensor,
    token_N: tl.tensor,
    part: tl.tensor,
    q_stride: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    HOW: tl.constexpr,
    PARTS: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Keys and the queries at positions ``at`` to ``at + M`` of those before ``high``, of one head.

    Of the gradients, the channels of a ``part``.
    """
    PD: tl.constexpr = HOW.D // PARTS
    PE: tl.constexpr = HOW.E // PARTS
    token_M = at + tl.arange(0, HOW.M)
    real_M, row_M = token_M < high, (token_M - past).to(tl.int64)
    q_MD = read(q, row_M * q_stride, real_M, 0, 1, HOW.d, HOW.D, True)
    grad_ME = read(grad, row_M, real_M, 0, HOW.heads * HOW.e, HOW.e, HOW.E, True)
    lse_M = tl.load(lse + row_M * HOW.heads, mask=real_M, other=0.0) * LOG2E
    delta_M = tl.load(delta + row_M * HOW.heads, mask=real_M, other=0.0)
    score_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
    power_NM, bent_NM = slopes(score_NM, lse_M[None, :], factor, bend, cap, HOW)
    if MASKED:
        seen_NM = token_N[:, None] <= token_M[None, :]
        if HOW.short:
            seen_NM = seen_NM & (token_N[:, None] >= lowest_seen(token_M, HOW)[None, :])
        power_NM = tl.where(seen_NM, power_NM, 0.0)
    grad_MP, q_MP = grad_ME, q_MD
    if PARTS > 1:
        grad_MP = read(grad, row_M, real_M, part * PE, HOW.heads * HOW.e, HOW.e, PE, True)
        q_MP = read(q, row_M * q_stride, real_M, part * PD, 1, HOW.d, PD, True)
    dv_NP = tl.dot(power_NM.to(grad_ME.dtype), grad_MP, dv_NP, input_precision="ieee")
    slope_NM = power_NM * (tl.dot(v_NE, tl.trans(grad_ME), input_precision="ieee") - delta_M[None, :])
    if HOW.capped:
        slope_NM = slope_NM * bent_NM
    return tl.dot(slope_NM.to(q_MD.dtype), q_MP, dk_NP, input_precision="ieee"), dv_NP


@jit
def keys_backward(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    grad_THe: tl.tensor,
    lse_TH: tl.tensor,
    delta_TH: tl.tensor,
    tiles_J5: tl.tensor,
    dk_SGd: tl.tensor,
    dv_SGe: tl.tensor,
    q_stride: tl.tensor,
    factor: tl.tensor,
    bend: tl.tensor,
    cap: tl.tensor,
    scale: tl.tensor,
    HOW: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One key-value head, N keys of a tile: the span's first key and query, its keys, keys before, the tile's first."""
    PD: tl.constexpr = HOW.D // PARTS
    PE: tl.constexpr = HOW.E // PARTS
    group, tile, part = tl.program_id(0), tiles_J5 + tl.program_id(1) * 5, tl.program_id(2)
    place, row = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    keys, past, first = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    token_N = first + tl.arange(0, HOW.N)
    real_N, last = token_N < keys, tl.minimum(first + HOW.N, keys) - 1
    k_ND = read(k_SGd + group * HOW.d + place * HOW.k_stride, token_N, real_N, 0, HOW.k_stride, HOW.d, HOW.D, True)
    v_NE = read(v_SGe + group * HOW.e + place * HOW.v_stride, token_N, real_N, 0, HOW.v_stride, HOW.e, HOW.E, True)
    high = keys
    if HOW.window > 0:
        high = tl.minimum(high, last + HOW.window)
    if HOW.chunk > 0:
        high = tl.minimum(high, (last // HOW.chunk + 1) * HOW.chunk)
    low = tl.maximum(first, past)
    # From here on queries see all keys of the tile, as far as they see all that came before.
    whole = low + tl.maximum(last - low + HOW.M - 1, 0) // HOW.M * HOW.M
    whole = high if HOW.short else tl.minimum(whole, high)
    dk_NP, dv_NP = zeros(HOW.N, PD), zeros(HOW.N, PE)
    for turn in range(0, HOW.r):
        head = group * HOW.r + turn
        q, grad = q_THd + head * HOW.d + row * q_stride, grad_THe + (row * HOW.heads + head) * HOW.e
        lse, delta = lse_TH + row * HOW.heads + head, delta_TH + row * HOW.heads + head
        told = (past, high, token_N, part, q_stride, factor, bend, cap)
        for at in range(low, whole, HOW.M):
            met = (dk_NP, dv_NP, k_ND, v_NE, q, grad, lse, delta, at)
            dk_NP, dv_NP = over_queries(*met, *told, HOW, PARTS, True)
        for at in range(whole, high, HOW.M):
            met = (dk_NP, dv_NP, k_ND, v_NE, q, grad, lse, delta, at)
            dk_NP, dv_NP = over_queries(*met, *told, HOW, PARTS, False)
    at_N = (place + token_N) * HOW.G + group
    channel_D, channel_E = part * PD + tl.arange(0, PD), part * PE + tl.arange(0, PE)
    dk_NP, dv_NP = (dk_NP * scale).to(dk_SGd.dtype.element_ty), dv_NP.to(dv_SGe.dtype.element_ty)
    written_ND = real_N[:, None] & (channel_D < HOW.d)[None, :]
    tl.store(dk_SGd + at_N[:, None] * HOW.d + channel_D[None, :], dk_NP, mask=written_ND)
    written_NE = real_N[:, None] & (channel_E < HOW.e)[None, :]
    tl.store(dv_SGe + at_N[:, None] * HOW.e + channel_E[None, :], dv_NP, mask=written_NE)
