"""Triton kernels of grouped LoRA: shrink (rows times A) and expand (times B, added to the projection's output).

Shapes: M rows of a tile, K inputs of a step, N columns of a block, R the padded rank, X all ranks of all targets.
"""

from __future__ import annotations

from typing import Any

from miles.kernels.runtime.triton_compat import HAVE_TRITON, gdc_launch_dependents, gdc_wait, jit, tl, triton

# Specializing on the number of rows would compile kernels in the middle of a step.
_jit_any_rows: Any = triton.jit(do_not_specialize=["tokens"]) if HAVE_TRITON else jit


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
    tile, target, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(tiles_ptr + tile * 3)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    rank = tl.load(ranks_ptr + slot * TARGETS + target)
    m_M, r_R, k_K = tl.arange(0, M), tl.arange(0, RANK_BLOCK), tl.arange(0, K)
    valid_M = m_M < count
    row_M = tl.load(rows_ptr + first + m_M, valid_M, other=0)
    if PDL:  # every program waits: one that ended early would let the next kernel start before the previous one is over
        gdc_wait()
    if (count > 0) & (rank > 0):
        x_MK = x_ptr + row_M.to(tl.int64)[:, None] * INPUTS + k_K[None, :]
        a_RK = a_ptr + ((slot.to(tl.int64) * TARGETS + target) * MAX_RANK + r_R)[:, None] * INPUTS + k_K[None, :]
        sum_MR = tl.zeros((M, RANK_BLOCK), tl.float32)
        begin = split * steps * K
        for step in range(0, steps):
            at = begin + step * K
            valid_K = at + k_K < INPUTS
            values_MK = tl.load(x_MK + at, valid_M[:, None] & valid_K[None, :], other=0.0)
            factor_RK = tl.load(a_RK + at, (r_R < rank)[:, None] & valid_K[None, :], other=0.0)
            sum_MR = tl.dot(values_MK, factor_RK.T, sum_MR, input_precision="ieee")
        position_M = (split * tokens + first + m_M).to(tl.int64)
        xa_MR = xa_ptr + position_M[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
        tl.store(xa_MR, sum_MR, valid_M[:, None] & (r_R < rank)[None, :])


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
    """One block of columns of one tile: sum the splits in order, scale, multiply by B, add to the output."""
    if PDL:
        gdc_launch_dependents()
    tile, block = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles_ptr + tile * 3)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    target = tl.load(columns_ptr + block * 4)
    column = tl.load(columns_ptr + block * 4 + 1)
    b_row = tl.load(columns_ptr + block * 4 + 2)
    columns = tl.load(columns_ptr + block * 4 + 3)
    rank = tl.load(ranks_ptr + slot * TARGETS + target)
    scale = tl.load(scales_ptr + slot * TARGETS + target)
    dtype = y_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
    m_M, r_R, n_N = tl.arange(0, M), tl.arange(0, RANK_BLOCK), tl.arange(0, N)
    valid_M, valid_N = m_M < count, n_N < columns
    valid_R = r_R < rank
    row_M = tl.load(rows_ptr + first + m_M, valid_M, other=0)
    # Factors are loaded while the previous kernel still computes the rows.
    b_NR = b_ptr + (slot.to(tl.int64) * outputs + b_row + n_N)[:, None] * MAX_RANK + r_R[None, :]
    factor_NR = tl.load(b_NR, (valid_N & (count > 0))[:, None] & valid_R[None, :], other=0.0)
    if PDL:
        gdc_wait()
    if (count > 0) & (rank > 0):
        at_MR = (first + m_M).to(tl.int64)[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
        valid_MR = valid_M[:, None] & valid_R[None, :]
        sum_MR = tl.load(xa_ptr + at_MR, valid_MR, other=0.0)
        for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            part = tokens.to(tl.int64) * split * (TARGETS * MAX_RANK)
            sum_MR += tl.load(xa_ptr + part + at_MR, valid_MR, other=0.0)
        scaled_MR = (sum_MR.to(dtype).to(tl.float32) * scale).to(dtype)
        delta_MN = tl.dot(scaled_MR, factor_NR.T, input_precision="ieee").to(dtype)
        at_MN = y_ptr + row_M.to(tl.int64)[:, None] * width + (column + n_N)[None, :]
        valid_MN = valid_M[:, None] & valid_N[None, :]
        y_MN = tl.load(at_MN, valid_MN, other=0.0)
        tl.store(at_MN, (y_MN.to(tl.float32) + delta_MN.to(tl.float32)).to(dtype), valid_MN)
