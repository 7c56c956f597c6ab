"""Triton functions of batch-invariant attention: attend to a block of keys, merge chunks, normalize.

Shapes: M queries of a tile, N keys of a block, D channels of a key, E of a value, X copies of one sum. CFG:
``tile_config.KernelConfig``; ``E`` may be a part of the ``e`` value channels.

A state is ``out`` (values weighted by powers of two), ``max`` (the largest exponent so far) and ``sum`` (of the powers,
as rounded for the matmul with the values). Sums are matmuls with ones and maxima have no order, so that no result
depends on the register layout of a tile: tiles may have queries as rows or, transposed, as columns. Wherever a product
might be rounded or not before an addition (FMA), the code says which.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportArgumentType=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from miles.kernels.runtime.triton_compat import jit, tl

CHUNK = tl.constexpr(512)
LOG2E = tl.constexpr(1.4426950408889634)


@jit
def load_rows(
    base: tl.tensor,
    row_N: tl.tensor,
    valid_N: tl.tensor,
    first: tl.tensor,
    stride: tl.constexpr,
    d: tl.constexpr,
    D: tl.constexpr,
    MASKED: tl.constexpr,
) -> Any:
    """D channels of rows, from ``first`` on; zeros where ``valid_N`` is false and beyond the ``d`` real ones."""
    channel_D = first + tl.arange(0, D)
    at_ND = base + row_N.to(tl.int64)[:, None] * stride + channel_D[None, :]
    if MASKED:
        valid_ND = valid_N[:, None] & (channel_D < d)[None, :] if d % D != 0 else valid_N[:, None]
        rows_ND = tl.load(at_ND, mask=valid_ND, other=0.0)
    elif d % D != 0:
        rows_ND = tl.load(at_ND, mask=(channel_D < d)[None, :], other=0.0)
    else:
        rows_ND = tl.load(at_ND)
    return rows_ND


@jit
def find_rows(pages: tl.tensor, token_N: tl.tensor, end: tl.tensor, CFG: tl.constexpr) -> Any:
    """Rows of a sequence's tokens: in pages, or contiguous."""
    row_N = token_N
    if CFG.page_size > 0:
        page_N = tl.load(pages + token_N // CFG.page_size, mask=token_N < end, other=0)
        row_N = page_N * CFG.page_size + token_N % CFG.page_size
    return row_N


@jit
def apply_softcap(score: tl.tensor, softcap_factor: tl.tensor, softcap: tl.tensor, CFG: tl.constexpr) -> Any:
    """Scores bounded by ``softcap``, if there is one: softcap * tanh(x) = softcap - 2 softcap / (1 + exp(2 x))."""
    if CFG.has_softcap:
        score = softcap - (2 * softcap) / (1 + tl.exp2(score * softcap_factor))
    return score


@jit
def finite_max(max_exponent: tl.tensor) -> Any:
    """The maximum that exponents are relative to; zero for a query that has seen nothing."""
    return tl.where(max_exponent == float("-inf"), 0.0, max_exponent)


@jit
def update_state(
    out_ME: tl.tensor,
    max_M: tl.tensor,
    sum_MX: tl.tensor,
    score_MN: tl.tensor,
    v_NE: tl.tensor,
    exp2_factor: tl.tensor,
    MASKED: tl.constexpr,
) -> Any:
    """Attend to a block, queries as rows. ``MASKED``: scores may be minus infinity, and queries may see nothing yet."""
    N: tl.constexpr = score_MN.shape[1]
    X: tl.constexpr = sum_MX.shape[1]
    new_max_M = tl.maximum(max_M, tl.max(score_MN, 1) * exp2_factor)
    finite_max_M = finite_max(new_max_M) if MASKED else new_max_M
    p_MN = tl.exp2(tl.fma(score_MN, exp2_factor, -finite_max_M[:, None]))
    p_MN = p_MN.to(v_NE.dtype)
    rescale_M1 = tl.exp2(max_M - finite_max_M)[:, None]
    out_ME = tl.dot(p_MN, v_NE, out_ME * rescale_M1, input_precision="ieee")
    ones_NX = tl.full([N, X], 1.0, v_NE.dtype)
    sum_MX = tl.dot(p_MN, ones_NX, sum_MX * rescale_M1, input_precision="ieee")
    return out_ME, new_max_M, sum_MX


@jit
def update_state_transposed(
    out_EM: tl.tensor, max_M: tl.tensor, sum_XM: tl.tensor, score_NM: tl.tensor, v_NE: tl.tensor, exp2_factor: tl.tensor
) -> Any:
    """``update_state`` with queries as columns, always masked."""
    N: tl.constexpr = score_NM.shape[0]
    X: tl.constexpr = sum_XM.shape[0]
    new_max_M = tl.maximum(max_M, tl.max(score_NM, 0) * exp2_factor)
    finite_max_M = finite_max(new_max_M)
    p_NM = tl.exp2(tl.fma(score_NM, exp2_factor, -finite_max_M[None, :]))
    p_NM = p_NM.to(v_NE.dtype)
    rescale_1M = tl.exp2(max_M - finite_max_M)[None, :]
    out_EM = tl.dot(tl.trans(v_NE), p_NM, out_EM * rescale_1M, input_precision="ieee")
    ones_XN = tl.full([X, N], 1.0, v_NE.dtype)
    sum_XM = tl.dot(ones_XN, p_NM, sum_XM * rescale_1M, input_precision="ieee")
    return out_EM, new_max_M, sum_XM


@jit
def merge_weights(max_M: tl.tensor, chunk_max_M: tl.tensor) -> Any:
    """The larger of two maxima, and the weights of both sides' sums relative to it."""
    new_max_M = tl.maximum(max_M, chunk_max_M)
    finite_max_M = finite_max(new_max_M)
    return new_max_M, tl.exp2(max_M - finite_max_M), tl.exp2(chunk_max_M - finite_max_M)


@jit
def weighted_sum(old: tl.tensor, new: tl.tensor, old_weight: tl.tensor, new_weight: tl.tensor) -> Any:
    """Sum of two weighted sums: the new product is rounded, the old one is not; an empty side changes nothing."""
    return tl.fma(old, old_weight, new * new_weight)


@jit
def merge_states(
    out_ME: tl.tensor,
    max_M: tl.tensor,
    sum_MX: tl.tensor,
    chunk_ME: tl.tensor,
    chunk_max_M: tl.tensor,
    chunk_MX: tl.tensor,
) -> Any:
    """Merge a chunk into all chunks before it, queries as rows."""
    max_M, old_weight_M, new_max_M = merge_weights(max_M, chunk_max_M)
    out_ME = weighted_sum(out_ME, chunk_ME, old_weight_M[:, None], new_max_M[:, None])
    return out_ME, max_M, weighted_sum(sum_MX, chunk_MX, old_weight_M[:, None], new_max_M[:, None])


@jit
def merge_states_transposed(
    out_EM: tl.tensor,
    max_M: tl.tensor,
    sum_XM: tl.tensor,
    chunk_EM: tl.tensor,
    chunk_max_M: tl.tensor,
    chunk_XM: tl.tensor,
) -> Any:
    """Merge a chunk into all chunks before it, queries as columns."""
    max_M, old_weight_M, new_max_M = merge_weights(max_M, chunk_max_M)
    out_EM = weighted_sum(out_EM, chunk_EM, old_weight_M[None, :], new_max_M[None, :])
    return out_EM, max_M, weighted_sum(sum_XM, chunk_XM, old_weight_M[None, :], new_max_M[None, :])


@jit
def add_sink(max_exponent: tl.tensor, total: tl.tensor, sink: tl.tensor) -> Any:
    """The sum of exponentials including the sink's."""
    return total + tl.exp2(tl.fma(sink, LOG2E, -finite_max(max_exponent)))


@jit
def normalize(out: tl.tensor, total: tl.tensor) -> Any:
    """Weighted values over the sum of exponentials; positive zeros for queries that saw nothing."""
    return out / tl.where(total == 0.0, 1.0, total) + 0.0
