"""Triton kernels of LoRA on routed experts: tiles of rows by (adapter, expert), shrink and expand.

Shapes: M rows of a tile, K inputs of a step, N columns of a block, R the padded rank, B rows of a scan.
"""

from __future__ import annotations

from typing import Any

from miles.kernels.runtime.triton_compat import HAVE_TRITON, gdc_launch_dependents, gdc_wait, jit, tl, triton

# Specializing on the number of rows would compile kernels in the middle of a step.
_jit_any_rows: Any = triton.jit(do_not_specialize=["rows", "tiles"]) if HAVE_TRITON else jit


@_jit_any_rows
def plan_tiles_kernel(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    rows: tl.tensor,
    tiles: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    M: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """The rows of one group (adapter, expert) after those of all earlier ones, and the tiles of them.

    The tiles of group g begin at g plus the full tiles of all earlier rows: no two groups overlap, and no program needs
    to know how many groups have rows.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0)
    before_B, mine_B = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        group_B = _load_groups(experts_ptr, slots_ptr, start, rows, EXPERTS, PER_TOKEN, HAS_SLOTS, BLOCK)
        before_B += ((group_B >= 0) & (group_B < group)).to(tl.int32)
        mine_B += (group_B == group).to(tl.int32)
    before, mine = tl.sum(before_B, 0), tl.sum(mine_B, 0)
    if mine > 0:
        next_index = before
        for start in range(0, rows, BLOCK):
            row_B = start + tl.arange(0, BLOCK)
            group_B = _load_groups(experts_ptr, slots_ptr, start, rows, EXPERTS, PER_TOKEN, HAS_SLOTS, BLOCK)
            is_mine_B = (group_B == group).to(tl.int32)
            tl.store(rows_ptr + next_index + tl.cumsum(is_mine_B, 0) - 1, row_B, is_mine_B > 0)
            next_index += tl.sum(is_mine_B, 0)
    first = before // M + group
    last = (before + mine) // M + group + 1
    if group == tl.num_programs(0) - 1:
        last = tiles
    for tile in range(first, last):
        offset = (tile - first) * M
        tl.store(tiles_ptr + tile * 3, group)
        tl.store(tiles_ptr + tile * 3 + 1, before + offset)
        tl.store(tiles_ptr + tile * 3 + 2, tl.maximum(tl.minimum(mine - offset, M), 0))


@jit
def _load_groups(
    experts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    start: tl.tensor,
    rows: tl.tensor,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The group of each row of a block; -1 without an adapter."""
    row_B = start + tl.arange(0, BLOCK)
    valid_B = row_B < rows
    group_B = tl.load(experts_ptr + row_B, valid_B, other=-1).to(tl.int32)
    if HAS_SLOTS:
        slot_B = tl.load(slots_ptr + row_B // PER_TOKEN, valid_B, other=-1).to(tl.int32)
        group_B = tl.where(valid_B & (slot_B >= 0), slot_B * EXPERTS + group_B, -1)
    return group_B


@_jit_any_rows
def expert_shrink_kernel(
    x_ptr: tl.tensor,
    a_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    xa_ptr: tl.tensor,
    rows: tl.tensor,
    steps: tl.tensor,
    INPUTS: tl.constexpr,
    TARGETS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OWN_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One split of the inputs of one tile and target, summed in float32; a row is a choice of token row // PER_TOKEN.

    ``OWN_EXPERTS`` are the A matrices of an adapter's target: one for each expert, or a single one.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, target, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = tl.load(tiles_ptr + tile * 3)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    if count > 0:
        slot, expert = group // EXPERTS, group % EXPERTS
        rank = MAX_RANK
        if HAS_RANKS:
            rank = tl.load(ranks_ptr + slot * TARGETS + target)
        m_M, r_R, k_K = tl.arange(0, M), tl.arange(0, RANK_BLOCK), tl.arange(0, K)
        valid_M = m_M < count
        row_M = tl.load(rows_ptr + first + m_M, valid_M, other=0)
        x_MK = x_ptr + (row_M // PER_TOKEN).to(tl.int64)[:, None] * INPUTS + k_K[None, :]
        matrix = (slot * TARGETS + target).to(tl.int64) * OWN_EXPERTS + (expert if OWN_EXPERTS > 1 else 0)
        a_RK = a_ptr + (matrix * MAX_RANK + r_R)[:, None] * INPUTS + k_K[None, :]
        sum_MR = tl.zeros((M, RANK_BLOCK), tl.float32)
        begin = split * steps * K
        for step in range(0, steps):
            at = begin + step * K
            valid_K = at + k_K < INPUTS
            values_MK = tl.load(x_MK + at, valid_M[:, None] & valid_K[None, :], other=0.0)
            factor_RK = tl.load(a_RK + at, (r_R < rank)[:, None] & valid_K[None, :], other=0.0)
            sum_MR = tl.dot(values_MK, factor_RK.T, sum_MR, input_precision="ieee")
        position_M = (split * rows + first + m_M).to(tl.int64)
        xa_MR = xa_ptr + position_M[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
        tl.store(xa_MR, sum_MR, valid_M[:, None] & (r_R < rank)[None, :])


@_jit_any_rows
def expert_expand_kernel(
    xa_ptr: tl.tensor,
    b_ptr: tl.tensor,
    ranks_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    scale: tl.tensor,
    rows_ptr: tl.tensor,
    tiles_ptr: tl.tensor,
    y_ptr: tl.tensor,
    rows: tl.tensor,
    first_column: tl.tensor,
    width: tl.tensor,
    OUTPUTS: tl.constexpr,
    TARGETS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OWN_EXPERTS: tl.constexpr,
    MAX_RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HAS_RANKS: tl.constexpr,
    SPLITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One block of columns of one tile and target: sum the splits in order, scale, multiply by B, add to the output.

    ``OUTPUTS`` are the columns of a target; those of the first begin at ``first_column``.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    tile, block = tl.program_id(0), tl.program_id(1)
    group = tl.load(tiles_ptr + tile * 3)
    first = tl.load(tiles_ptr + tile * 3 + 1)
    count = tl.load(tiles_ptr + tile * 3 + 2)
    blocks = tl.cdiv(OUTPUTS, N)
    target = block // blocks
    if count > 0:
        slot, expert = group // EXPERTS, group % EXPERTS
        rank = MAX_RANK
        if HAS_RANKS:
            rank = tl.load(ranks_ptr + slot * TARGETS + target)
            scale = tl.load(scales_ptr + slot * TARGETS + target)
        dtype = y_ptr.dtype.element_ty  # pyright: ignore[reportAttributeAccessIssue]
        m_M, r_R = tl.arange(0, M), tl.arange(0, RANK_BLOCK)
        n_N = (block % blocks) * N + tl.arange(0, N)
        valid_M, valid_N = m_M < count, n_N < OUTPUTS
        valid_R = r_R < rank
        row_M = tl.load(rows_ptr + first + m_M, valid_M, other=0)
        matrix = (slot * TARGETS + target).to(tl.int64) * OWN_EXPERTS + (expert if OWN_EXPERTS > 1 else 0)
        b_NR = b_ptr + (matrix * OUTPUTS + n_N)[:, None] * MAX_RANK + r_R[None, :]
        factor_NR = tl.load(b_NR, valid_N[:, None] & valid_R[None, :], other=0.0)
        at_MR = (first + m_M).to(tl.int64)[:, None] * (TARGETS * MAX_RANK) + (target * MAX_RANK + r_R)[None, :]
        valid_MR = valid_M[:, None] & valid_R[None, :]
        sum_MR = tl.load(xa_ptr + at_MR, valid_MR, other=0.0)
        for split in tl.static_range(1, SPLITS):  # pyright: ignore[reportGeneralTypeIssues]
            part = rows.to(tl.int64) * split * (TARGETS * MAX_RANK)
            sum_MR += tl.load(xa_ptr + part + at_MR, valid_MR, other=0.0)
        scaled_MR = (sum_MR.to(dtype).to(tl.float32) * scale).to(dtype)
        delta_MN = tl.dot(scaled_MR, factor_NR.T, input_precision="ieee").to(dtype)
        column_N = first_column + target * OUTPUTS + n_N
        at_MN = y_ptr + row_M.to(tl.int64)[:, None] * width + column_N[None, :]
        valid_MN = valid_M[:, None] & valid_N[None, :]
        y_MN = tl.load(at_MN, valid_MN, other=0.0)
        # Between the product and the sum, else the compiler starts the product at y, which rounds otherwise in float32.
        delta_MN = tl.where(valid_MN, delta_MN, 0.0)
        tl.store(at_MN, (y_MN.to(tl.float32) + delta_MN.to(tl.float32)).to(dtype), valid_MN)
