"""Triton kernels of the batch-invariant attention backward: dK/dV over keys and dQ over queries, sums in a fixed order.

Shapes: M queries and N keys of a tile, D channels of a key, E of a value, P a part of either; T queries, H = G * r
query heads, I tiles of queries, J tiles of keys. CFG: ``tile_config.KernelConfig``.
"""

# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.attention.tiles_triton import extend_visible, first_visible
from miles.kernels.batch_invariant.attention_triton import LOG2E, apply_softcap, load_rows
from miles.kernels.runtime.triton_compat import jit, tl


@jit
def zeros(M: tl.constexpr, D: tl.constexpr) -> Any:
    """An empty accumulator."""
    return tl.zeros([M, D], tl.float32)


@jit
def row_dot_kernel(grad: tl.tensor, out: tl.tensor, delta_TH: tl.tensor, rows: tl.tensor, CFG: tl.constexpr) -> None:
    """Dot products of gradients and outputs (delta), one row per head of a token."""
    row_M, channel_E = tl.program_id(0) * CFG.M + tl.arange(0, CFG.M), tl.arange(0, CFG.E)
    at_ME = row_M.to(tl.int64)[:, None] * CFG.e + channel_E[None, :]
    valid_ME = (row_M < rows)[:, None] & (channel_E < CFG.e)[None, :]
    grad_ME = tl.load(grad + at_ME, mask=valid_ME, other=0.0).to(tl.float32)
    out_ME = tl.load(out + at_ME, mask=valid_ME, other=0.0).to(tl.float32)
    tl.store(delta_TH + row_M, tl.sum(grad_ME * out_ME, 1), mask=row_M < rows)


@jit
def softmax_and_softcap_grad(
    score: tl.tensor,
    lse: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """Softmax probabilities of the scores, and the derivative of the softcap."""
    score = apply_softcap(score, softcap_factor, softcap, CFG)
    softcap_grad = score
    if CFG.has_softcap:
        softcap_grad = 1.0 - (score / softcap) * (score / softcap)
    return tl.exp2(score * exp2_factor - lse), softcap_grad


@jit
def accumulate_dq(
    dq_MD: tl.tensor,
    q_MD: tl.tensor,
    grad_ME: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    lse_M: tl.tensor,
    delta_M: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Add the keys at positions ``start`` to ``start + N`` to dQ."""
    token_N = start + tl.arange(0, CFG.N)
    k_ND = load_rows(k, token_N, token_N < end, 0, CFG.k_stride, CFG.d, CFG.D, MASKED)
    v_NE = load_rows(v, token_N, token_N < end, 0, CFG.v_stride, CFG.e, CFG.E, MASKED)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    p_MN, softcap_grad_MN = softmax_and_softcap_grad(
        score_MN, lse_M[:, None], exp2_factor, softcap_factor, softcap, CFG
    )
    if MASKED:
        visible_MN = token_N[None, :] <= high_M[:, None]
        if CFG.is_windowed:
            visible_MN = visible_MN & (token_N[None, :] >= low_M[:, None])
        p_MN = tl.where(visible_MN, p_MN, 0.0)
    ds_MN = p_MN * (tl.dot(grad_ME, tl.trans(v_NE), input_precision="ieee") - delta_M[:, None])
    if CFG.has_softcap:
        ds_MN = ds_MN * softcap_grad_MN
    return tl.dot(ds_MN.to(k_ND.dtype), k_ND, dq_MD, input_precision="ieee")


@jit
def dq_kernel(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    grad_THe: tl.tensor,
    lse_TH: tl.tensor,
    delta_TH: tl.tensor,
    tiles_I4: tl.tensor,
    visible_ends_T: tl.tensor,
    dq_THd: tl.tensor,
    q_stride: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    scale: tl.tensor,
    CFG: tl.constexpr,
) -> None:
    """One head, and M queries of a tile; tiles as in the forward."""
    head = tl.program_id(0)
    tile = tiles_I4 + tl.program_id(1) * 4
    first_query = tl.program_id(2) * CFG.M
    count = tl.load(tile + 2) - first_query
    if count > 0:
        key_start, m_M = tl.load(tile).to(tl.int64), tl.arange(0, CFG.M)
        real_M = m_M < count
        row_M = (tl.load(tile + 1) + first_query + tl.where(real_M, m_M, 0)).to(tl.int64)
        first = tl.load(tile + 3) + first_query
        end = first + tl.minimum(count, CFG.M)
        high_M = tl.minimum(first + m_M, end - 1)
        low_M = first_visible(high_M, CFG)
        high_M, end = extend_visible(high_M, end, visible_ends_T, row_M, real_M, CFG)
        index_M = row_M * CFG.heads + head
        q_MD = load_rows(q_THd + head * CFG.d, row_M * q_stride, real_M, 0, 1, CFG.d, CFG.D, True)
        grad_ME = load_rows(grad_THe, index_M, real_M, 0, CFG.e, CFG.e, CFG.E, True)
        lse_M = tl.load(lse_TH + index_M, mask=real_M, other=0.0) * LOG2E
        delta_M = tl.load(delta_TH + index_M, mask=real_M, other=0.0)
        k = k_SGd + head // CFG.r * CFG.d + key_start * CFG.k_stride
        v = v_SGe + head // CFG.r * CFG.e + key_start * CFG.v_stride
        mask_inputs = (end, low_M, high_M, exp2_factor, softcap_factor, softcap)
        begin = first_visible(first, CFG) // CFG.N * CFG.N
        full_begin = begin if CFG.is_windowed else (first + 1) // CFG.N * CFG.N
        dq_MD = zeros(CFG.M, CFG.D)
        for start in range(begin, full_begin, CFG.N):
            dq_MD = accumulate_dq(dq_MD, q_MD, grad_ME, k, v, lse_M, delta_M, start, *mask_inputs, CFG, False)
        for start in range(full_begin, end, CFG.N):
            dq_MD = accumulate_dq(dq_MD, q_MD, grad_ME, k, v, lse_M, delta_M, start, *mask_inputs, CFG, True)
        channel_D = tl.arange(0, CFG.D)
        stored_MD = real_M[:, None] & (channel_D < CFG.d)[None, :]
        dq_MD = (dq_MD * scale).to(dq_THd.dtype.element_ty)
        tl.store(dq_THd + index_M[:, None] * CFG.d + channel_D[None, :], dq_MD, mask=stored_MD)


@jit
def accumulate_dkv(
    dk_NP: tl.tensor,
    dv_NP: tl.tensor,
    k_ND: tl.tensor,
    v_NE: tl.tensor,
    q: tl.tensor,
    grad: tl.tensor,
    lse: tl.tensor,
    delta: tl.tensor,
    start: tl.tensor,
    past: tl.tensor,
    high: tl.tensor,
    visible_ends: tl.tensor,
    token_N: tl.tensor,
    part: tl.tensor,
    q_stride: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    PARTS: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Add the queries at positions ``start`` to ``start + M`` (before ``high``) of one head to dK and dV.

    Of the gradients, only the channels of a ``part``.
    """
    PD: tl.constexpr = CFG.D // PARTS
    PE: tl.constexpr = CFG.E // PARTS
    token_M = start + tl.arange(0, CFG.M)
    real_M, row_M = token_M < high, (token_M - past).to(tl.int64)
    q_MD = load_rows(q, row_M * q_stride, real_M, 0, 1, CFG.d, CFG.D, True)
    grad_ME = load_rows(grad, row_M, real_M, 0, CFG.heads * CFG.e, CFG.e, CFG.E, True)
    lse_M = tl.load(lse + row_M * CFG.heads, mask=real_M, other=0.0) * LOG2E
    delta_M = tl.load(delta + row_M * CFG.heads, mask=real_M, other=0.0)
    score_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
    p_NM, softcap_grad_NM = softmax_and_softcap_grad(
        score_NM, lse_M[None, :], exp2_factor, softcap_factor, softcap, CFG
    )
    if MASKED:
        high_M = token_M
        if CFG.has_visible_ends:
            high_M = tl.load(visible_ends + row_M, mask=real_M, other=0) - 1
        visible_NM = token_N[:, None] <= high_M[None, :]
        if CFG.is_windowed:
            visible_NM = visible_NM & (token_N[:, None] >= first_visible(token_M, CFG)[None, :])
        p_NM = tl.where(visible_NM, p_NM, 0.0)
    grad_MP, q_MP = grad_ME, q_MD
    if PARTS > 1:
        grad_MP = load_rows(grad, row_M, real_M, part * PE, CFG.heads * CFG.e, CFG.e, PE, True)
        q_MP = load_rows(q, row_M * q_stride, real_M, part * PD, 1, CFG.d, PD, True)
    dv_NP = tl.dot(p_NM.to(grad_ME.dtype), grad_MP, dv_NP, input_precision="ieee")
    ds_NM = p_NM * (tl.dot(v_NE, tl.trans(grad_ME), input_precision="ieee") - delta_M[None, :])
    if CFG.has_softcap:
        ds_NM = ds_NM * softcap_grad_NM
    return tl.dot(ds_NM.to(q_MD.dtype), q_MP, dk_NP, input_precision="ieee"), dv_NP


@jit
def dkv_kernel(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    grad_THe: tl.tensor,
    lse_TH: tl.tensor,
    delta_TH: tl.tensor,
    tiles_J6: tl.tensor,
    visible_ends_T: tl.tensor,
    dk_SGd: tl.tensor,
    dv_SGe: tl.tensor,
    q_stride: tl.tensor,
    exp2_factor: tl.tensor,
    softcap_factor: tl.tensor,
    softcap: tl.tensor,
    scale: tl.tensor,
    CFG: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """One key-value head, N keys of a tile: the span's first key and query, its keys, keys before, the tile's first.

    The last column is the position of the first query that sees any of them.
    """
    PD: tl.constexpr = CFG.D // PARTS
    PE: tl.constexpr = CFG.E // PARTS
    group = tl.program_id(0)
    tile = tiles_J6 + tl.program_id(1) * 6
    part = tl.program_id(2)
    key_start, row = tl.load(tile).to(tl.int64), tl.load(tile + 1).to(tl.int64)
    keys, past, first = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    token_N = first + tl.arange(0, CFG.N)
    real_N, last = token_N < keys, tl.minimum(first + CFG.N, keys) - 1
    k_ND = load_rows(
        k_SGd + group * CFG.d + key_start * CFG.k_stride, token_N, real_N, 0, CFG.k_stride, CFG.d, CFG.D, True
    )
    v_NE = load_rows(
        v_SGe + group * CFG.e + key_start * CFG.v_stride, token_N, real_N, 0, CFG.v_stride, CFG.e, CFG.E, True
    )
    high = keys
    if CFG.window > 0:
        high = tl.minimum(high, last + CFG.window)
    if CFG.chunk > 0:
        high = tl.minimum(high, (last // CFG.chunk + 1) * CFG.chunk)
    low = tl.load(tile + 5)
    # From here on queries see all keys of the tile, as far as there is no window.
    full_begin = low + tl.maximum(last - low + CFG.M - 1, 0) // CFG.M * CFG.M
    full_begin = high if CFG.is_windowed else tl.minimum(full_begin, high)
    dk_NP, dv_NP = zeros(CFG.N, PD), zeros(CFG.N, PE)
    for head_in_group in range(0, CFG.r):
        head = group * CFG.r + head_in_group
        q, grad = q_THd + head * CFG.d + row * q_stride, grad_THe + (row * CFG.heads + head) * CFG.e
        lse, delta = lse_TH + row * CFG.heads + head, delta_TH + row * CFG.heads + head
        mask_inputs = (past, high, visible_ends_T + row, token_N, part, q_stride, exp2_factor, softcap_factor, softcap)
        for start in range(low, full_begin, CFG.M):
            kv_inputs = (dk_NP, dv_NP, k_ND, v_NE, q, grad, lse, delta, start)
            dk_NP, dv_NP = accumulate_dkv(*kv_inputs, *mask_inputs, CFG, PARTS, True)
        for start in range(full_begin, high, CFG.M):
            kv_inputs = (dk_NP, dv_NP, k_ND, v_NE, q, grad, lse, delta, start)
            dk_NP, dv_NP = accumulate_dkv(*kv_inputs, *mask_inputs, CFG, PARTS, False)
    index_N = (key_start + token_N) * CFG.G + group
    channel_D, channel_E = part * PD + tl.arange(0, PD), part * PE + tl.arange(0, PE)
    dk_NP, dv_NP = (dk_NP * scale).to(dk_SGd.dtype.element_ty), dv_NP.to(dv_SGe.dtype.element_ty)
    stored_ND = real_N[:, None] & (channel_D < CFG.d)[None, :]
    tl.store(dk_SGd + index_N[:, None] * CFG.d + channel_D[None, :], dk_NP, mask=stored_ND)
    stored_NE = real_N[:, None] & (channel_E < CFG.e)[None, :]
    tl.store(dv_SGe + index_N[:, None] * CFG.e + channel_E[None, :], dv_NP, mask=stored_NE)
