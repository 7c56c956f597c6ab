"""Rows sorted by their group in one launch, where there are few enough that each group may look at all of them.

Shapes: T tokens, k groups a token, R = T * k rows, E groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.device_code import HAVE_TRITON, early, gdc_launch_dependents, gdc_wait, jit, on, tl, triton
from miles.kernels.grouped import Rows, order_rows

# With more rows than this a sort is quicker.
_MOST = 1 << 15


def ordered(groups_Tk: Tensor, num_groups: int) -> Rows:
    """As ``grouped.order_rows``: tokens in order within a group; no wait for the device."""
    rows = groups_Tk.numel()
    if not (groups_Tk.is_cuda and HAVE_TRITON and 0 < rows <= _MOST):
        return order_rows(groups_Tk, num_groups)
    return sort_rows(groups_Tk.contiguous(), num_groups)


def sort_rows(groups_Tk: Tensor, num_groups: int) -> Rows:
    """``ordered`` as device code."""
    rows = groups_Tk.numel()
    order_R, place_R, group_R = (torch.empty(rows, dtype=torch.int64, device=groups_Tk.device) for _ in range(3))
    ends_E = torch.empty(num_groups, dtype=torch.int32, device=groups_Tk.device)
    with on(groups_Tk):
        _sort_rows[(num_groups,)](
            *(groups_Tk, order_R, place_R, group_R, ends_E, rows),
            BLOCK=min(triton.next_power_of_2(rows), 2048),
            num_warps=4,
            **early(groups_Tk.device),
        )
    return Rows(order_R, place_R, group_R, ends_E, groups_Tk.shape[-1])


@jit
def _sort_rows(
    groups_ptr: tl.tensor,
    order_ptr: tl.tensor,
    place_ptr: tl.tensor,
    group_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:
    """One group's rows, behind as many as earlier groups have."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0).to(tl.int64)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row_B = start + tl.arange(0, BLOCK)
        chosen_B = tl.load(groups_ptr + row_B, row_B < rows, other=group)
        before += (chosen_B < group).to(tl.int32)
    placed = tl.sum(before, 0)
    for start in range(0, rows, BLOCK):
        row_B = start + tl.arange(0, BLOCK)
        chosen_B = tl.load(groups_ptr + row_B, row_B < rows, other=-1)
        mine_B = (chosen_B == group).to(tl.int32)
        at_B = placed + tl.cumsum(mine_B, 0) - 1
        tl.store(order_ptr + at_B, row_B.to(tl.int64), mine_B > 0)
        tl.store(place_ptr + row_B, at_B.to(tl.int64), mine_B > 0)
        tl.store(group_ptr + at_B, group, mine_B > 0)
        placed += tl.sum(mine_B, 0)
    tl.store(ends_ptr + group, placed)
