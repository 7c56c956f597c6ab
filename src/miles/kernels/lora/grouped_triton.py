"""Triton kernels of grouped LoRA: shrink (rows times A), and expand (times B, added to the projection's output), also
with the gated activation behind it.

Shapes: M rows of a tile, K inputs of a step, N columns of a block, R the padded rank, X all ranks of all targets.
"""

from __future__ import annotations

from typing import Any

from miles.kernels.fused.activation import activate_and_multiply
from miles.kernels.runtime.triton_compat import HAVE_TRITON, gdc_launch_dependents, gdc_wait, jit, tl, triton

# Specializing on the number of rows would compile kernels in the middle of a step.
_jit_any_rows: Any = triton.jit(do_not_specialize=["tokens"]) if HAVE_TRITON else jit


@jit
def _load_tile(tiles_ptr: tl.tensor, rows_ptr: tl.tensor, tile: tl.tensor, M: tl.constexpr) -> tuple:
    """The slot of a tile, the first of its rows, their number, and the rows; -1 is the slot of rows without one."""
    slot = tl.load(tiles_ptr + tile * 3)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    m_M = tl.arange(0, M)
    return slot, first, count, tl.load(rows_ptr + first + m_M, m_M < count, other=0)


@_jit_any_rows
def shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    xa_ptr: tl.tensor,
    tokens: tl.tensor,
    steps: tl.tensor,
    INPUTS: tl.constexpr,
    TARGETS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One split of the inputs of one tile and target: ``steps`` steps of ``K`` inputs, summed in float32."""
    if PDL:
        gdc_launch_dependents()
    split, target, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, first, count, row_M = _load_tile(tiles_ptr, rows_ptr, tile, M)
    # Programs without work end at once, but the first waits: else the next kernel could start before the previous one
    # is over.
    has_work = (count > 0) & (slot >= 0)
    if PDL:  # noqa: SIM102 - PDL is known when the kernel is compiled
        if has_work | (split + target + tile == 0):
            gdc_wait()
    if has_work:
        rank = tl.load(ranks_ptr + slot * TARGETS + target)
        m_M, r_R, k_K = tl.arange(0, M), tl.arange(0, RANK_BLOCK), tl.arange(0, K)
        valid_M = m_M < count
        x_MK = x_ptr + row_M.to(tl.int64)[:, None] * INPUTS + k_K[None, :]
        a_RK = a_ptr + ((slot.to(tl.int64) * TARGETS + target) * MAX_RANK + r_R)[:, None] * INPUTS + k_K[None, :]
        sum_MR = tl.zeros((M, RANK_BLOCK), tl.float32)
        begin = split * steps * K
        for step in range(0, tl.where(rank > 0, steps, 0)):
            at = begin + step * K
            valid_K = at + k_K < INPUTS
            values_MK = tl.load(x_MK + at, valid_M[:, None] & valid_K[None, :], other=0.0)
            factor_RK = tl.load(a_RK + at, (r_R < rank)[:, None] & valid_K[None, :], other=0.0)
            sum_MR = tl.dot(values_MK, factor_RK.T, sum_MR, input_precision="ieee")
        position_M = (split * tokens + first + m_M).to(tl.int64)
        xa_MR = xa_ptr + position_M[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
        tl.store(xa_MR, sum_MR, valid_M[:, None] & (r_R < rank)[None, :])


@jit
def _add_product(
    y_MN: tl.tensor,
    xa_ptr: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    tokens: tl.tensor,
    target: tl.tensor,
    rank: tl.tensor,
    scale: tl.tensor,
    factor_NR: tl.tensor,
    TARGETS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
) -> tl.tensor:
    """Sum the splits of a tile and target in order, scale, multiply by B, add to ``y``, which may be wider than B."""
    m_M, r_R = tl.arange(0, M), tl.arange(0, RANK_BLOCK)
    at_MR = (first + m_M).to(tl.int64)[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
    valid_MR = (m_M < count)[:, None] & (r_R < rank)[None, :]
    sum_MR = tl.load(xa_ptr + at_MR, valid_MR, other=0.0)
    for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
        part = tokens.to(tl.int64) * split * (TARGETS * MAX_RANK)
        sum_MR += tl.load(xa_ptr + part + at_MR, valid_MR, other=0.0)
    scaled_MR = (sum_MR.to(factor_NR.dtype).to(tl.float32) * scale).to(factor_NR.dtype)
    delta_MN = tl.dot(scaled_MR, factor_NR.T, input_precision="ieee").to(y_MN.dtype)
    # Between the product and the sum, else the compiler starts the product at y, which rounds otherwise in float32.
    delta_MN = tl.where((m_M < count)[:, None], delta_MN, 0.0)
    return (y_MN.to(tl.float32) + delta_MN.to(tl.float32)).to(y_MN.dtype)


@_jit_any_rows
def expand_kernel(
    xa_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    columns_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    y_ptr: tl.tensor,
    tokens: tl.tensor,
    outputs: tl.tensor,
    width: tl.tensor,
    TARGETS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of columns of one tile: add the product to the output."""
    if PDL:
        gdc_launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    slot, first, count, row_M = _load_tile(tiles_ptr, rows_ptr, tile, M)
    has_work = (count > 0) & (slot >= 0)
    if has_work:
        target = tl.load(columns_ptr + block * 4)
        column = tl.load(columns_ptr + block * 4 + 1)
        b_row = tl.load(columns_ptr + block * 4 + 2)
        columns = tl.load(columns_ptr + block * 4 + 3)
        rank = tl.load(ranks_ptr + slot * TARGETS + target)
        scale = tl.load(scales_ptr + slot * TARGETS + target)
        m_M, r_R, n_N = tl.arange(0, M), tl.arange(0, RANK_BLOCK), tl.arange(0, N)
        # Factors are loaded while the previous kernel still computes the rows.
        b_NR = b_ptr + (slot.to(tl.int64) * outputs + b_row + n_N)[:, None] * MAX_RANK + r_R[None, :]
        factor_NR = tl.load(b_NR, (n_N < columns)[:, None] & (r_R < rank)[None, :], other=0.0)
        if PDL:
            gdc_wait()
        if rank > 0:
            at_MN = y_ptr + row_M.to(tl.int64)[:, None] * width + (column + n_N)[None, :]
            valid_MN = (m_M < count)[:, None] & (n_N < columns)[None, :]
            y_MN = tl.load(at_MN, valid_MN, other=0.0)
            product = (xa_ptr, first, count, tokens, target, rank, scale, factor_NR)
            y_MN = _add_product(y_MN, *product, TARGETS, MAX_RANK, RANK_BLOCK, SPLITS, M)
            tl.store(at_MN, y_MN, valid_MN)
    elif PDL:  # noqa: SIM102
        if block + tile == 0:
            gdc_wait()


@_jit_any_rows
def expand_gated_kernel(
    xa_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    y_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of columns of one tile of a projection to gate and up: add the products, activate, multiply.

    Rows without an adapter have tiles of slot -1, in which nothing is added.
    """
    if PDL:
        gdc_launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    slot, first, count, row_M = _load_tile(tiles_ptr, rows_ptr, tile, M)
    if count > 0:
        has_slot, factors = slot >= 0, tl.maximum(slot, 0).to(tl.int64)
        m_M, r_R = tl.arange(0, M), tl.arange(0, RANK_BLOCK)
        column_N = block * N + tl.arange(0, N)
        gate_rank = tl.where(has_slot, tl.load(ranks_ptr + factors * 2), 0)
        up_rank = tl.where(has_slot, tl.load(ranks_ptr + factors * 2 + 1), 0)
        gate_scale, up_scale = tl.load(scales_ptr + factors * 2), tl.load(scales_ptr + factors * 2 + 1)
        b_NR = b_ptr + (factors * 2 * size + column_N)[:, None] * MAX_RANK + r_R[None, :]
        valid_N = column_N < size
        gate_NR = tl.load(b_NR, valid_N[:, None] & (r_R < gate_rank)[None, :], other=0.0)
        up_NR = tl.load(b_NR + size * MAX_RANK, valid_N[:, None] & (r_R < up_rank)[None, :], other=0.0)
        if PDL:
            gdc_wait()
        at_M = row_M.to(tl.int64)
        y_MN = y_ptr + at_M[:, None] * (2 * size) + column_N[None, :]
        valid_MN = (m_M < count)[:, None] & valid_N[None, :]
        gate_MN = tl.load(y_MN, valid_MN, other=0.0)
        up_MN = tl.load(y_MN + size, valid_MN, other=0.0)
        if gate_rank > 0:
            product = (xa_ptr, first, count, tokens, 0, gate_rank, gate_scale, gate_NR)
            gate_MN = _add_product(gate_MN, *product, 2, MAX_RANK, RANK_BLOCK, SPLITS, M)
        if up_rank > 0:
            product = (xa_ptr, first, count, tokens, 1, up_rank, up_scale, up_NR)
            up_MN = _add_product(up_MN, *product, 2, MAX_RANK, RANK_BLOCK, SPLITS, M)
        out_MN = activate_and_multiply(gate_MN, up_MN, ACTIVATION, True)
        tl.store(out_ptr + at_M[:, None] * size + column_N[None, :], out_MN, valid_MN)
    elif PDL:  # noqa: SIM102
        if block + tile == 0:
            gdc_wait()
