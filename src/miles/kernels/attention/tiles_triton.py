"""Triton functions shared by the paged decode and prefill kernels: online-softmax attention over tiles of tokens.

Shapes: M queries of a tile, N tokens of a tile, D channels of a key, E of a value, X key channels beyond the value's
(MLA). D, E and X are powers of two, of which ``d``, ``e`` and ``x`` are real. CFG: ``tile_config.KernelConfig``.

Scores are left unscaled; ``factor`` turns them into exponents of two. ``max_M`` and ``sum_M`` are the running maximum
of the scores and the sum of exponentials relative to it, ``out_ME`` the sum of values so weighted.

An FP8 KV cache under queries of half precision (``CFG.fp16_dots``) is multiplied without its scales, as float16: GPUs
convert two E4M3 values to float16 in one instruction, and to bfloat16 in five. Scales of keys multiply the scores.
Those of values, powers of two, are added to the exponents: a weight is 2**(score * factor + log2(value scale) - max_M),
where ``max_M`` is the largest of these exponents. So weights are at most 1, the largest contribution to the output has
weight 1, and float16 holds the others to 2**-25 of it. ``sum_M`` leaves the scales out again.

Bytes of values cannot be transposed on their way from shared memory to the tensor cores, pairs of bytes can. So small
tiles (``CFG.paired``) load two channels as one 16-bit number; even and odd channels have an accumulator each.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.fused.kv_cache_fp8 import decode_e4m3, dequantize_rows, scale_offset
from miles.kernels.runtime.triton_compat import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)
# Queries are divided by this before they are rounded to float16: magnitudes up to a million fit, and what is rounded
# below 2**-10 changes by less than 2**-20. The largest product with an E4M3 value is 2**16 * 448, far within float32.
Q_RANGE = tl.constexpr(16.0)


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
def extend_visible(
    high_M: tl.tensor,
    end: tl.tensor,
    visible_ends_T: tl.tensor,
    row_M: tl.tensor,
    real_M: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """The last token that each query attends to, and one past all of these, where queries see beyond themselves."""
    if CFG.has_visible_ends:
        high_M = tl.maximum(high_M, tl.load(visible_ends_T + row_M, mask=real_M, other=0) - 1)
        end = tl.maximum(end, tl.max(high_M, 0) + 1)
    return high_M, end


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
    STEP: tl.constexpr = 1,
) -> Any:
    """Load rows of ``d`` channels, STEP apart, padded to D with zeros; zeros where ``valid_N`` is false."""
    channel_D = tl.arange(0, D)
    at_ND = base + row_N.to(tl.int64)[:, None] * stride + (channel_D * STEP)[None, :]
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
def load_two_scales(
    first: tl.tensor, second: tl.tensor, slot_N: tl.tensor, valid_N: tl.tensor, CFG: tl.constexpr
) -> Any:
    """``load_scales`` of two tensors in one load.

    The compiler repeats a load of fewer elements than threads in every thread that needs one. So this one has as many:
    each scale ``CFG.scale_copies`` times.
    """
    N: tl.constexpr = CFG.N
    COPIES: tl.constexpr = CFG.scale_copies
    HEADS: tl.constexpr = 2 if CFG.latent else CFG.G
    at_N1 = scale_offset(slot_N, CFG.page_size, HEADS)[:, None]
    distance = (second.to(tl.int64, bitcast=True) - first.to(tl.int64, bitcast=True)) // 4
    which_1C = (tl.arange(0, 2 * COPIES) % 2)[None, :]
    scale_NC = tl.load(first + at_N1 + distance * which_1C, mask=valid_N[:, None], other=0.0)
    if COPIES == 1:
        first_N, second_N = tl.split(scale_NC)
    else:
        first_NC, second_NC = tl.split(tl.reshape(scale_NC, [N, COPIES, 2]))
        first_N, second_N = tl.max(first_NC, 1), tl.max(second_NC, 1)
    return first_N, second_N


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
def load_pairs(
    base: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    stride: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Load rows of ``d`` bytes as pairs, [N, D // 2]: the byte of the even channel is the lower one."""
    pairs = base.to(tl.pointer_type(tl.uint16), bitcast=True)
    return load_rows(pairs, row_N, stride // 2, valid_N, d // 2, D // 2, MASKED)


@jit
def decode_pairs(pair_ND: tl.tensor, CFG: tl.constexpr) -> Any:
    """Even and odd channels of pairs of E4M3 bytes, in float16 and without their scales."""
    if CFG.native_fp8:
        # Two pairs at a time: their bytes 0, 2 and 1, 3 are brought together, and each two converted at once.
        even_ND, odd_ND = tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pair_ND],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        even_ND = decode_e4m3((pair_ND & 0xFF).to(tl.uint8), tl.float16, False)
        odd_ND = decode_e4m3((pair_ND >> 8).to(tl.uint8), tl.float16, False)
    return even_ND, odd_ND


@jit
def apply_softcap(score_MN: tl.tensor, scale: tl.tensor, softcap: tl.tensor, CFG: tl.constexpr) -> Any:
    """Scores bounded by ``softcap``, if there is one; these are scaled already."""
    if CFG.has_softcap:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        p_MN = tl.exp2(score_MN * (2 * LOG2E * scale / softcap))
        score_MN = softcap - 2 * softcap / (1 + p_MN)
    return score_MN


@jit
def score_factor(scale: tl.tensor, CFG: tl.constexpr) -> Any:
    """The factor that turns a score into an exponent of two."""
    return scale * 0.0 + LOG2E if CFG.has_softcap else scale * LOG2E


@jit
def exp2_factor(scale: tl.tensor, CFG: tl.constexpr) -> Any:
    """The factor that turns ``max_M`` into an exponent of two: 1 if it is one already."""
    return scale * 0.0 + 1.0 if CFG.fp16_dots else score_factor(scale, CFG)


@jit
def exponents_with_scales(
    score_MN: tl.tensor,
    k_scale_N: tl.tensor,
    v_scale_N: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
) -> Any:
    """Exponents of the weights of E4M3 values, and the inverse scales of the values, from scores without scales."""
    biased_N = v_scale_N.to(tl.int32, bitcast=True) >> 23
    exponent_N = (biased_N - 127).to(tl.float32)
    if CFG.has_softcap:
        score_MN = apply_softcap(score_MN * (k_scale_N * Q_RANGE)[None, :], scale, softcap, CFG)
        exponent_MN = score_MN * LOG2E + exponent_N[None, :]
    else:
        exponent_MN = score_MN * (k_scale_N * (scale * (LOG2E * Q_RANGE)))[None, :] + exponent_N[None, :]
    return exponent_MN, ((254 - biased_N) << 23).to(tl.float32, bitcast=True)


@jit
def online_softmax_with_scales(
    exponent_MN: tl.tensor,
    inverse_N: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    MAY_BE_EMPTY: tl.constexpr,
) -> Any:
    """``online_softmax`` of exponents that include the scales of values, which the sum leaves out."""
    new_max_M = tl.maximum(max_M, tl.max(exponent_MN, 1))
    finite_max_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M) if MAY_BE_EMPTY else new_max_M
    p_MN = tl.exp2(exponent_MN - finite_max_M[:, None])
    rescale_M = tl.exp2(max_M - finite_max_M)
    return p_MN, rescale_M, new_max_M, sum_M * rescale_M + tl.sum(p_MN * inverse_N[None, :], 1)


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
    """Load the queries at these offsets; separately, the channels beyond the value's (MLA).

    The second result are the odd channels, if keys are loaded in pairs; the first then has the even ones.
    """
    if CFG.paired:
        q_MD = load_rows(q, at_M, 1, real_M, CFG.d // 2, CFG.D // 2, True, 2)
        odd_MD = load_rows(q + 1, at_M, 1, real_M, CFG.d // 2, CFG.D // 2, True, 2)
    else:
        q_MD = load_rows(q, at_M, 1, real_M, CFG.d, CFG.D, True)
        odd_MD = q_MD
    q_MX = q_MD
    if CFG.x > 0:
        q_MX = load_rows(q + CFG.d, at_M, 1, real_M, CFG.x, CFG.X, True)
    if CFG.fp16_dots:
        q_MD, odd_MD, q_MX = narrow_queries(q_MD), narrow_queries(odd_MD), narrow_queries(q_MX)
    return q_MD, odd_MD, q_MX


@jit
def narrow_queries(q_MD: tl.tensor) -> Any:
    """Queries over ``Q_RANGE``, in float16.

    The addition of zero is needed: LLVM swaps a product with a power of two and the conversion behind it, which then
    overflows (``fptrunc`` of an ``fmul`` of two numbers of few bits).
    """
    return tl.fma(q_MD.to(tl.float32), 1.0 / Q_RANGE, 0.0).to(tl.float16)


@jit
def init_state(CFG: tl.constexpr) -> Any:
    """The softmax state of queries that have seen no token: outputs, those of odd channels, maximum and sum.

    Unless values are loaded in pairs the outputs have all channels, and the second result is not used.
    """
    M: tl.constexpr = CFG.M
    E: tl.constexpr = CFG.E // 2 if CFG.paired else CFG.E
    max_M = tl.full([M], float("-inf"), tl.float32)
    out_ME = tl.zeros([M, E], tl.float32)
    return out_ME, tl.zeros([M, E], tl.float32), max_M, tl.zeros([M], tl.float32)


@jit
def join_channels(out_ME: tl.tensor, odd_ME: tl.tensor, CFG: tl.constexpr) -> Any:
    """Outputs with all channels, of the two that ``init_state`` describes."""
    if CFG.paired:
        M: tl.constexpr = CFG.M
        E: tl.constexpr = CFG.E
        out_ME = tl.reshape(tl.join(out_ME, odd_ME), [M, E])
    return out_ME


@jit
def load_and_score(
    q_MD: tl.tensor,
    q_MX: tl.tensor,
    k: tl.tensor,
    k_scales: tl.tensor,
    slot_N: tl.tensor,
    valid_N: tl.tensor,
    CFG: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> Any:
    """Load the keys of a tile: scores, and the keys."""
    k_ND = load_rows(k, slot_N, CFG.k_stride, valid_N, CFG.d, CFG.D, BOUNDED)
    k_ND = dequantize(k_ND, k_scales, slot_N, valid_N, q_MD.dtype, CFG)
    score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if CFG.x > 0:
        k_NX = load_rows(k + CFG.d, slot_N, CFG.k_stride, valid_N, CFG.x, CFG.X, BOUNDED)
        k_NX = dequantize(k_NX, k_scales + CFG.page_size, slot_N, valid_N, q_MX.dtype, CFG)
        score_MN = tl.dot(q_MX, tl.trans(k_NX), score_MN, input_precision="ieee")
    return score_MN, k_ND


@jit
def load_and_score_fp8(
    q_MD: tl.tensor,
    odd_MD: tl.tensor,
    q_MX: tl.tensor,
    k: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    slot_N: tl.tensor,
    valid_N: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> Any:
    """Load FP8 keys and the scales of a tile: ``exponents_with_scales``, and the keys without scales.

    The keys are of even and odd channels, if loaded in pairs.
    """
    second_scales = k_scales + CFG.page_size if CFG.latent else v_scales
    k_scale_N, v_scale_N = load_two_scales(k_scales, second_scales, slot_N, valid_N, CFG)
    M: tl.constexpr = CFG.M
    N: tl.constexpr = CFG.N
    score_MN = tl.zeros([M, N], tl.float32)
    if CFG.latent:
        # The second scale is that of the RoPE channels; the scale of the latent multiplies the sum.
        k_NX = load_rows(k + CFG.d, slot_N, CFG.k_stride, valid_N, CFG.x, CFG.X, BOUNDED)
        ratio_N = v_scale_N / tl.where(k_scale_N == 0.0, 1.0, k_scale_N)
        score_MN = tl.dot(q_MX, tl.trans(decode_e4m3(k_NX, tl.float16, CFG.native_fp8))) * ratio_N[None, :]
        v_scale_N = k_scale_N
    if CFG.paired:
        k_ND, k_odd_ND = decode_pairs(load_pairs(k, slot_N, valid_N, CFG.k_stride, CFG.d, CFG.D, BOUNDED), CFG)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), score_MN)
        score_MN = tl.dot(odd_MD, tl.trans(k_odd_ND), score_MN)
    else:
        k_ND = load_rows(k, slot_N, CFG.k_stride, valid_N, CFG.d, CFG.D, BOUNDED)
        k_ND = decode_e4m3(k_ND, tl.float16, CFG.native_fp8)
        k_odd_ND = k_ND
        score_MN = tl.dot(q_MD, tl.trans(k_ND), score_MN)
    score_MN, inverse_N = exponents_with_scales(score_MN, k_scale_N, v_scale_N, scale, softcap, CFG)
    return score_MN, inverse_N, k_ND, k_odd_ND


@jit
def attend_range(
    out_ME: tl.tensor,
    odd_ME: tl.tensor,
    max_M: tl.tensor,
    sum_M: tl.tensor,
    q_MD: tl.tensor,
    odd_MD: tl.tensor,
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
        if CFG.fp16_dots:
            fp8_inputs = (q_MD, odd_MD, q_MX, k, k_scales, v_scales, slot_N, valid_N, scale, softcap)
            score_MN, inverse_N, v_NE, v_odd_NE = load_and_score_fp8(*fp8_inputs, CFG, BOUNDED)
        else:
            score_MN, v_NE = load_and_score(q_MD, q_MX, k, k_scales, slot_N, valid_N, CFG, BOUNDED)
            score_MN = apply_softcap(score_MN, scale, softcap, CFG)
            inverse_N, v_odd_NE = valid_N, v_NE
        if BOUNDED:
            score_MN = tl.where(valid_N[None, :], score_MN, float("-inf"))
        if MASK_LOW:
            score_MN = tl.where(token_N[None, :] >= low_M[:, None], score_MN, float("-inf"))
        if MASK_HIGH:
            score_MN = tl.where(token_N[None, :] <= high_M[:, None], score_MN, float("-inf"))
        if CFG.fp16_dots:
            p_MN, rescale_M, max_M, sum_M = online_softmax_with_scales(score_MN, inverse_N, max_M, sum_M, MASK_LOW)
        else:
            p_MN, rescale_M, max_M, sum_M = online_softmax(score_MN, max_M, sum_M, exp2_factor(scale, CFG), MASK_LOW)
        if not CFG.latent:
            v_NE, v_odd_NE = load_values(v, v_scales, slot_N, valid_N, q_MD.dtype, CFG, BOUNDED)
        out_ME = tl.dot(p_MN.to(v_NE.dtype), v_NE, out_ME * rescale_M[:, None], input_precision="ieee")
        if CFG.paired:
            odd_ME = tl.dot(p_MN.to(v_NE.dtype), v_odd_NE, odd_ME * rescale_M[:, None])
    return out_ME, odd_ME, max_M, sum_M


@jit
def load_values(
    v: tl.tensor,
    v_scales: tl.tensor,
    slot_N: tl.tensor,
    valid_N: tl.tensor,
    DTYPE: tl.constexpr,
    CFG: tl.constexpr,
    BOUNDED: tl.constexpr,
) -> Any:
    """Values of a tile, without their scales if ``CFG.fp16_dots``; of even and odd channels, if loaded in pairs."""
    if CFG.paired:
        pair_NE = load_pairs(v, slot_N, valid_N, CFG.v_stride, CFG.e, CFG.E, BOUNDED)
        v_NE, odd_NE = decode_pairs(pair_NE, CFG)
    else:
        v_NE = load_rows(v, slot_N, CFG.v_stride, valid_N, CFG.e, CFG.E, BOUNDED)
        if CFG.fp16_dots:
            v_NE = decode_e4m3(v_NE, tl.float16, CFG.native_fp8)
        else:
            v_NE = dequantize(v_NE, v_scales, slot_N, valid_N, DTYPE, CFG)
        odd_NE = v_NE
    return v_NE, odd_NE


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
