"""Device code of attention over pages that decode and prefill share: queries of a tile meet tokens, tile after tile.

Shapes: M queries of a tile, N tokens of a tile, D channels of a key, E of a value, X channels of a key that are none of
its value's (latent form). D, E and X are powers of two; ``d``, ``e`` and ``x`` of them are real. HOW: see ``tiling``.

Scores stay as the product left them; ``factor`` makes exponents of two of them. ``top_M`` and ``sum_M`` are the highest
score so far and the sum of powers under it, ``out_ME`` the sum of values so weighted.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import jit, tl

LOG2E = tl.constexpr(1.4426950408889634)


@jit
def lowest_seen(position: tl.tensor, HOW: tl.constexpr) -> Any:
    """The first token that a token at this position sees."""
    lowest = position * 0
    if HOW.window > 0:
        lowest = tl.maximum(lowest, position + 1 - HOW.window)
    if HOW.chunk > 0:
        lowest = tl.maximum(lowest, position // HOW.chunk * HOW.chunk)
    return lowest


@jit
def find_slots(pages: tl.tensor, token_N: tl.tensor, end: tl.tensor, HOW: tl.constexpr) -> Any:
    """Where tokens of a sequence lie; those from ``end`` on anywhere."""
    page_N = tl.load(pages + token_N // HOW.page, mask=token_N < end, other=0)
    return page_N * HOW.page + token_N % HOW.page


@jit
def read_rows(
    held: tl.tensor,
    row_N: tl.tensor,
    stride: tl.tensor,
    seen_N: tl.tensor,
    d: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """Vectors of a cache or of queries; zeros where ``seen_N`` is false, and beyond their ``d`` channels."""
    channel_D = tl.arange(0, D)
    at_ND = held + row_N.to(tl.int64)[:, None] * stride + channel_D[None, :]
    if MASKED:
        seen_ND = seen_N[:, None] & (channel_D[None, :] < d) if d < D else seen_N[:, None]
        rows_ND = tl.load(at_ND, mask=seen_ND, other=0.0)
    elif d < D:
        rows_ND = tl.load(at_ND, mask=channel_D[None, :] < d, other=0.0)
    else:
        rows_ND = tl.load(at_ND)
    return rows_ND


@jit
def bound(score_MN: tl.tensor, scale: tl.tensor, softcap: tl.tensor, HOW: tl.constexpr) -> Any:
    """Scores no larger than ``softcap``, if there is one: these are scaled already."""
    if HOW.capped:
        # tanh(x) = 1 - 2 / (1 + exp(2 x))
        power_MN = tl.exp2(score_MN * (2 * LOG2E * scale / softcap))
        score_MN = softcap - 2 * softcap / (1 + power_MN)
    return score_MN


@jit
def exponent(scale: tl.tensor, HOW: tl.constexpr) -> Any:
    """What makes an exponent of two of a score."""
    return scale * 0.0 + LOG2E if HOW.capped else scale * LOG2E


@jit
def weigh(score_MN: tl.tensor, top_M: tl.tensor, sum_M: tl.tensor, factor: tl.tensor, HIDDEN: tl.constexpr) -> Any:
    """Powers of the scores under their new top, and how much all that came before shrinks.

    ``HIDDEN``: a query may have seen nothing yet.
    """
    new_M = tl.maximum(top_M, tl.max(score_MN, 1))
    peak_M = tl.where(new_M == float("-inf"), 0.0, new_M) if HIDDEN else new_M
    power_MN = tl.exp2(score_MN * factor - (peak_M * factor)[:, None])
    # Exactly one where the top stays. A difference of two products would not be: one is rounded, the other is not, and
    # what is left over would come again with every tile.
    shrink_M = tl.exp2((top_M - peak_M) * factor)
    return power_MN, shrink_M, new_M, sum_M * shrink_M + tl.sum(power_MN, 1)


@jit
def read_queries(q: tl.tensor, at_M: tl.tensor, real_M: tl.tensor, HOW: tl.constexpr) -> Any:
    """The queries that begin at these places; apart, their channels that meet no values."""
    q_MD = read_rows(q, at_M, 1, real_M, HOW.d, HOW.D, True)
    q_MX = q_MD
    if HOW.x > 0:
        q_MX = read_rows(q + HOW.d, at_M, 1, real_M, HOW.x, HOW.X, True)
    return q_MD, q_MX


@jit
def nothing_yet(HOW: tl.constexpr) -> Any:
    """The state of queries that have met no token."""
    M: tl.constexpr = HOW.M
    E: tl.constexpr = HOW.E
    top_M = tl.full([M], float("-inf"), tl.float32)
    return tl.zeros([M, E], tl.float32), top_M, tl.zeros([M], tl.float32)


@jit
def sweep(
    out_ME: tl.tensor,
    top_M: tl.tensor,
    sum_M: tl.tensor,
    q_MD: tl.tensor,
    q_MX: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    pages: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    low_M: tl.tensor,
    high_M: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    HOW: tl.constexpr,
    EDGE: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
) -> Any:
    """Queries meet tokens [begin, end), from ``low_M`` on if LOW, up to ``high_M`` if HIGH.

    Without EDGE they are a whole number of tiles.
    """
    place_N = tl.arange(0, HOW.N)
    for at in range(begin, end, HOW.N):
        token_N = at + place_N
        slot_N = find_slots(pages, token_N, end, HOW)
        seen_N = token_N < end
        k_ND = read_rows(k, slot_N, HOW.k_stride, seen_N, HOW.d, HOW.D, EDGE)
        score_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        if HOW.x > 0:
            k_NX = read_rows(k + HOW.d, slot_N, HOW.k_stride, seen_N, HOW.x, HOW.X, EDGE)
            score_MN = tl.dot(q_MX, tl.trans(k_NX), score_MN, input_precision="ieee")
        score_MN = bound(score_MN, scale, softcap, HOW)
        if EDGE:
            score_MN = tl.where(seen_N[None, :], score_MN, float("-inf"))
        if LOW:
            score_MN = tl.where(token_N[None, :] >= low_M[:, None], score_MN, float("-inf"))
        if HIGH:
            score_MN = tl.where(token_N[None, :] <= high_M[:, None], score_MN, float("-inf"))
        power_MN, shrink_M, top_M, sum_M = weigh(score_MN, top_M, sum_M, exponent(scale, HOW), LOW)
        v_NE = k_ND
        if not HOW.latent:
            v_NE = read_rows(v, slot_N, HOW.v_stride, seen_N, HOW.e, HOW.E, EDGE)
        out_ME = tl.dot(power_MN.to(v_NE.dtype), v_NE, out_ME * shrink_M[:, None], input_precision="ieee")
    return out_ME, top_M, sum_M


@jit
def divide(
    out_ME: tl.tensor, top_M: tl.tensor, sum_M: tl.tensor, sink_M: tl.tensor, factor: tl.tensor, SUNK: tl.constexpr
) -> Any:
    """Weighted values over the sum of powers, to which a sink adds its own; zeros for who saw nothing."""
    if SUNK:
        under_M = tl.where(top_M == float("-inf"), 0.0, top_M * factor)
        sum_M += tl.exp2(sink_M * LOG2E - under_M)
    return out_ME / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]


@jit
def read_sinks(sinks_H: tl.tensor, head_M: tl.tensor, real_M: tl.tensor, HOW: tl.constexpr) -> Any:
    """The sink of each head, in float32; nothing that is used if there are none."""
    sink_M = head_M.to(tl.float32)
    if HOW.sunk:
        sink_M = tl.load(sinks_H + head_M, mask=real_M, other=0.0).to(tl.float32)
    return sink_M


@jit
def write_rows(held: tl.tensor, row_M: tl.tensor, out_ME: tl.tensor, real_M: tl.tensor, HOW: tl.constexpr) -> None:
    """Rows of ``e`` channels, one behind the other."""
    channel_E = tl.arange(0, HOW.E)
    at_ME = held + row_M.to(tl.int64)[:, None] * HOW.e + channel_E[None, :]
    tl.store(at_ME, out_ME.to(held.dtype.element_ty), mask=real_M[:, None] & (channel_E[None, :] < HOW.e))
