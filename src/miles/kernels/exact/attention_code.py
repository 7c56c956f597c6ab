"""Device code that every form of exact attention is made of: a block of keys is met, chunks are joined, sums divide.

Shapes: M queries of a tile, N keys of a block, D channels of a key, E of a value, X copies of one sum. HOW: see
``tiling``; ``E`` may be some of the ``e`` channels of a value.

A state is ``out`` (values weighted by powers of two), ``top`` (the highest exponent so far) and ``sum`` (of the powers,
as rounded for the product with the values). Sums are products with ones and maxima have no order, so that no result
depends on how a tile lies in the registers: tiles may have queries down (``meet``) or across (``meet_across``).
Wherever a product could be rounded or not before it is added to, the code says which.
"""

# What a kernel is compiled for reaches it as a constant of the compiler's, whose type says nothing of what is in it.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from miles.kernels.device_code import jit, tl

CHUNK = tl.constexpr(512)
LOG2E = tl.constexpr(1.4426950408889634)


@jit
def read(
    held: tl.tensor,
    row_N: tl.tensor,
    seen_N: tl.tensor,
    first: tl.tensor,
    stride: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """D channels of rows, from the ``first`` on; zeros where ``seen_N`` is false and beyond the ``d`` there are."""
    channel_D = first + tl.arange(0, D)
    at_ND = held + row_N.to(tl.int64)[:, None] * stride + channel_D[None, :]
    if MASKED:
        seen_ND = seen_N[:, None] & (channel_D < d)[None, :] if d % D != 0 else seen_N[:, None]
        rows_ND = tl.load(at_ND, mask=seen_ND, other=0.0)
    elif d % D != 0:
        rows_ND = tl.load(at_ND, mask=(channel_D < d)[None, :], other=0.0)
    else:
        rows_ND = tl.load(at_ND)
    return rows_ND


@jit
def find(pages: tl.tensor, token_N: tl.tensor, end: tl.tensor, HOW: tl.constexpr) -> Any:
    """Rows of a sequence's tokens: in pages, or one after the other."""
    row_N = token_N
    if HOW.page > 0:
        page_N = tl.load(pages + token_N // HOW.page, mask=token_N < end, other=0)
        row_N = page_N * HOW.page + token_N % HOW.page
    return row_N


@jit
def bound(score: tl.tensor, bend: tl.tensor, cap: tl.tensor, HOW: tl.constexpr) -> Any:
    """Scores no larger than ``cap``, if there is one: cap * tanh(x) = cap - 2 cap / (1 + exp(2 x))."""
    if HOW.capped:
        score = cap - (2 * cap) / (1 + tl.exp2(score * bend))
    return score


@jit
def above(top: tl.tensor) -> Any:
    """What exponents are counted from; a query that has seen nothing counts from zero."""
    return tl.where(top == float("-inf"), 0.0, top)


@jit
def meet(
    out_ME: tl.tensor,
    top_M: tl.tensor,
    sum_MX: tl.tensor,
    score_MN: tl.tensor,
    v_NE: tl.tensor,
    factor: tl.tensor,
    HIDDEN: tl.constexpr,
) -> Any:
    """Queries, down, meet a block. ``HIDDEN``: some scores may be minus infinity, and some queries see nothing yet."""
    N: tl.constexpr = score_MN.shape[1]
    X: tl.constexpr = sum_MX.shape[1]
    new_M = tl.maximum(top_M, tl.max(score_MN, 1) * factor)
    under_M = above(new_M) if HIDDEN else new_M
    power_MN = tl.exp2(tl.fma(score_MN, factor, -under_M[:, None]))
    power_MN = power_MN.to(v_NE.dtype)
    shrink_M1 = tl.exp2(top_M - under_M)[:, None]
    out_ME = tl.dot(power_MN, v_NE, out_ME * shrink_M1, input_precision="ieee")
    ones_NX = tl.full([N, X], 1.0, v_NE.dtype)
    sum_MX = tl.dot(power_MN, ones_NX, sum_MX * shrink_M1, input_precision="ieee")
    return out_ME, new_M, sum_MX


@jit
def meet_across(
    out_EM: tl.tensor, top_M: tl.tensor, sum_XM: tl.tensor, score_NM: tl.tensor, v_NE: tl.tensor, factor: tl.tensor
) -> Any:
    """The same of queries across."""
    N: tl.constexpr = score_NM.shape[0]
    X: tl.constexpr = sum_XM.shape[0]
    new_M = tl.maximum(top_M, tl.max(score_NM, 0) * factor)
    under_M = above(new_M)
    power_NM = tl.exp2(tl.fma(score_NM, factor, -under_M[None, :]))
    power_NM = power_NM.to(v_NE.dtype)
    shrink_1M = tl.exp2(top_M - under_M)[None, :]
    out_EM = tl.dot(tl.trans(v_NE), power_NM, out_EM * shrink_1M, input_precision="ieee")
    ones_XN = tl.full([X, N], 1.0, v_NE.dtype)
    sum_XM = tl.dot(ones_XN, power_NM, sum_XM * shrink_1M, input_precision="ieee")
    return out_EM, new_M, sum_XM


@jit
def weights(top_M: tl.tensor, chunk_M: tl.tensor) -> Any:
    """The higher of two tops, and what either side's sums are worth under it."""
    new_M = tl.maximum(top_M, chunk_M)
    under_M = above(new_M)
    return new_M, tl.exp2(top_M - under_M), tl.exp2(chunk_M - under_M)


@jit
def both(old: tl.tensor, new: tl.tensor, old_weight: tl.tensor, new_weight: tl.tensor) -> Any:
    """Two sums as one: the new product is rounded, the old one is not. Nothing beside something leaves it as it is."""
    return tl.fma(old, old_weight, new * new_weight)


@jit
def join(
    out_ME: tl.tensor,
    top_M: tl.tensor,
    sum_MX: tl.tensor,
    chunk_ME: tl.tensor,
    chunk_M: tl.tensor,
    chunk_MX: tl.tensor,
) -> Any:
    """A chunk behind all chunks before it, queries down."""
    top_M, old_M, new_M = weights(top_M, chunk_M)
    out_ME = both(out_ME, chunk_ME, old_M[:, None], new_M[:, None])
    return out_ME, top_M, both(sum_MX, chunk_MX, old_M[:, None], new_M[:, None])


@jit
def join_across(
    out_EM: tl.tensor,
    top_M: tl.tensor,
    sum_XM: tl.tensor,
    chunk_EM: tl.tensor,
    chunk_M: tl.tensor,
    chunk_XM: tl.tensor,
) -> Any:
    """A chunk behind all chunks before it, queries across."""
    top_M, old_M, new_M = weights(top_M, chunk_M)
    out_EM = both(out_EM, chunk_EM, old_M[None, :], new_M[None, :])
    return out_EM, top_M, both(sum_XM, chunk_XM, old_M[None, :], new_M[None, :])


@jit
def add_sink(top: tl.tensor, total: tl.tensor, sink: tl.tensor) -> Any:
    """The sum of powers with that of a sink."""
    return total + tl.exp2(tl.fma(sink, LOG2E, -above(top)))


@jit
def divide(out: tl.tensor, total: tl.tensor) -> Any:
    """Weighted values over the sum of powers; zeros, of one kind, for who saw nothing."""
    return out / tl.where(total == 0.0, 1.0, total) + 0.0
