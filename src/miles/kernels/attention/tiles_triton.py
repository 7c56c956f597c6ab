"""Triton functions shared by the paged decode and prefill kernels: online-softmax attention over tiles of tokens.

Shapes: M queries of a tile, N tokens of a tile, D channels of a key, E of a value, X key channels beyond the value's
(MLA). D, E and X are powers of two, of which ``d``, ``e`` and ``x`` are real. CFG: ``tile_config.KernelConfig``.

Scores are left unscaled; ``factor`` turns them into exponents of two. ``max_M`` and ``sum_M`` are the running maximum
of the scores and the sum of exponentials relative to it, ``out_ME`` the sum of values so weighted.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.fused.kv_cache_fp8 import dequantize_rows, scale_offset
from miles.kernels.runtime.triton_compat import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def first_visible(position: tl.tensor, CFG: tl.constexpr) -> Any:
    """The first token that a token at this position attends to."""
    first = position * 0
    if CFG.window > 0:
        first = tl.maximum(first, position + 1 - CFG.window)
    if CFG.chunk > 0:
        first = tl.maximum(first, position // CFG.chunk * CFG.chunk)
    return first


@jit
def find_slots(pages: tl.tensor, token_N: tl.tensor, end: tl.tensor, CFG: tl.constexpr) -> Any:
    """KV-cache slots of a sequence's tokens; arbitrary ones from ``end`` on."""
    page_N = tl.load(pages + token_N // CFG.page_size, mask=token_N < end, other=0)
    return page_N * CFG.page_size + token_N % CFG.page_size


@jit
def load_rows(
    base: tl.tensor,
    row_N: tl.tensor,
    stride: tl.tensor,
    valid_N: tl.tensor,
    d: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Load rows of ``d`` channels, padded to D with zeros; zeros where ``valid_N`` is false."""
    channel_D = tl.arange(0, D)
    at_ND = base + row_N.to(tl.int64)[:, None] * stride + channel_D[None, :]
    if MASKED:
        valid_ND = valid_N[:, None] & (channel_D[None, :] < d) if d < D else valid_N[:, None]
        rows_ND = tl.load(at_ND, mask=valid_ND, other=0.0)
    elif d < D:
        rows_ND = tl.load(at_ND, mask=channel_D[None, :] < d, other=0.0)
    else:
        rows_ND = tl.load(at_ND)
    return rows_ND


@jit
def load_scales(scales: tl.tensor, slot_N: tl.tensor, valid_N: tl.tensor, CFG: tl.constexpr) -> Any:
    """Scales of one head's tokens in an FP8 KV cache; ``scales`` points to that head's first."""
    HEADS: tl.constexpr = 2 if CFG.latent else CFG.G
    return tl.load(scales + scale_offset(slot_N, CFG.page_size, HEADS), mask=valid_N, other=0.0)


@jit
def dequantize(
    rows_ND: tl.tensor,
    scales: tl.tensor,
    slot_N: tl.tensor,
    valid_N: tl.tensor,
    DTYPE: tl.constexpr,
    CFG: tl.constexpr,
) -> Any:
    """Keys or values as loaded; those of an FP8 cache times their scales, in the dtype of the queries."""
    if CFG.fp8:
        rows_ND = dequantize_rows(rows_ND, load_scales(scales, slot_N, valid_N, CFG), DTYPE, CFG.native_fp8)
    return rows_ND


@jit
def apply_softcap(score_MN: tl.tensor, scale: tl.tensor, softcap: tl.tensor, CFG: tl.constexpr) -> Any:
    """Scores bounded by ``softcap``, if there is one; these are scaled already."""
    if CFG.has_softcap:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        p_MN = tl.exp2(score_MN * (2 * LOG2E * scale / softcap))
        score_MN = softcap - 2 * softcap / (1 + p_MN)
    return score_MN


@jit
def exp2_factor(scale: tl.tensor, CFG: tl.constexpr) -> Any:
    """The factor that turns a score into an exponent of two."""
    return scale * 0.0 + LOG2E if CFG.has_softcap else scale * LOG2E


@jit
def online_softmax(
    score_MN: tl.tensor, max_M: tl.tensor, sum_M: tl.tensor, factor: tl.tensor, MAY_BE_EMPTY: tl.constexpr
) -> Any:
    """Exponentials of the scores relative to the new maximum, and the factor that rescales earlier sums.

    ``MAY_BE_EMPTY``: a query may have seen no token yet.
    """
    new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
    finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MAY_BE_EMPTY else new_max_M
    p_MN = tl.exp2(score_MN * factor - (finite_max_M * factor)[:, None])
    # Exactly one where the maximum stays. A difference of two products would not be: one is rounded and the other is
    # not, and the error would be repeated with every tile.
    rescale_M = tl.exp2((max_M - finite_max_M) * factor)
    return p_MN, rescale_M, new_max_M, sum_M * rescale_M + tl.sum(p_MN, 1)


@jit
def load_queries(q: tl.tensor, at_M: tl.tensor, real_M: tl.tensor, CFG: tl.constexpr) -> Any:
    """Load the queries at these offsets; separately, the channels beyond the value's (MLA)."""
    q_MD = load_rows(q, at_M, 1, real_M, CFG.d, CFG.D, True)
    q_MX = q_MD
    if CFG.x > 0:
        q_MX = load_rows(q + CFG.d, at_M, 1, real_M, CFG.x, CFG.X, True)
    return q_MD, q_MX


@jit
def init_state(CFG: tl.constexpr) -> Any:
    """The softmax state of queries that have seen no token."""
    M: tl.constexpr = CFG.M
    E: tl.constexpr = CFG.E
    max_M = tl.full([M], float("-inf"), tl.float32)
    return tl.zeros([M, E], tl.float32), max_M, tl.zeros([M], tl.float32)


@jit
def attend_range(
    out_ME: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    q_MD: tl.tensor,
    q_MX: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    BOUNDED: tl.constexpr,
    MASK_LOW: tl.constexpr,
    MASK_HIGH: tl.constexpr,
) -> Any:
    """Attend to tokens [begin, end): from ``low_M`` on if MASK_LOW, up to ``high_M`` if MASK_HIGH.

    Without BOUNDED the range is a whole number of tiles.
    """
    offset_N = tl.arange(0, CFG.N)
    for start in range(begin, end, CFG.N):
        token_N = start + offset_N
        slot_N = find_slots(pages, token_N, end, CFG)
        valid_N = token_N < end
        k_ND = load_rows(k, slot_N, CFG.k_stride, valid_N, CFG.d, CFG.D, BOUNDED)
        k_ND = dequantize(k_ND, k_scales, slot_N, valid_N, q_MD.dtype, CFG)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if CFG.x > 0:
            k_NX = load_rows(k + CFG.d, slot_N, CFG.k_stride, valid_N, CFG.x, CFG.X, BOUNDED)
            k_NX = dequantize(k_NX, k_scales + CFG.page_size, slot_N, valid_N, q_MX.dtype, CFG)
            score_MN = tl.dot(q_MX, tl.trans(k_NX), score_MN, input_precision="ieee")
        score_MN = apply_softcap(score_MN, scale, softcap, CFG)
        if BOUNDED:
            score_MN = tl.where(valid_N[None, :], score_MN, float("-inf"))
        if MASK_LOW:
            score_MN = tl.where(token_N[None, :] >= low_M[:, None], score_MN, float("-inf"))
        if MASK_HIGH:
            score_MN = tl.where(token_N[None, :] <= high_M[:, None], score_MN, float("-inf"))
        p_MN, rescale_M, max_M, sum_M = online_softmax(score_MN, max_M, sum_M, exp2_factor(scale, CFG), MASK_LOW)
        v_NE = k_ND
        if not CFG.latent:
            v_NE = load_rows(v, slot_N, CFG.v_stride, valid_N, CFG.e, CFG.E, BOUNDED)
            v_NE = dequantize(v_NE, v_scales, slot_N, valid_N, q_MD.dtype, CFG)
        out_ME = tl.dot(p_MN.to(v_NE.dtype), v_NE, out_ME * rescale_M[:, None], input_precision="ieee")
    return out_ME, max_M, sum_M


@jit
def normalize(
    out_ME: tl.tensor, max_M: tl.tensor, sum_M: tl.tensor, sink_M: tl.tensor, factor: tl.tensor, HAS_SINKS: tl.constexpr
) -> Any:
    """Weighted values over the sum of exponentials, including the sink's; zeros for queries that saw nothing."""
    if HAS_SINKS:
        max_exponent_M = tl.where(max_M == float("-inf"), 0.0, max_M * factor)
        sum_M += tl.exp2(sink_M * LOG2E - max_exponent_M)
    return out_ME / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@jit
def load_sinks(sinks_H: tl.tensor, head_M: tl.tensor, real_M: tl.tensor, CFG: tl.constexpr) -> Any:
    """The attention sink of each head, in float32; an unused value if there are none."""
    sink_M = head_M.to(tl.float32)
    if CFG.has_sinks:
        sink_M = tl.load(sinks_H + head_M, mask=real_M, other=0.0).to(tl.float32)
    return sink_M


@jit
def store_rows(base: tl.tensor, row_M: tl.tensor, out_ME: tl.tensor, real_M: tl.tensor, CFG: tl.constexpr) -> None:
    """Store contiguous rows of ``e`` channels."""
    channel_E = tl.arange(0, CFG.E)
    at_ME = base + row_M.to(tl.int64)[:, None] * CFG.e + channel_E[None, :]
    tl.store(at_ME, out_ME.to(base.dtype.element_ty), mask=real_M[:, None] & (channel_E[None, :] < CFG.e))
