"""Sort rows by expert in one kernel, for few enough rows that each expert can scan all of them.

Shapes: T tokens, k groups per token, R = T * k rows, E groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.moe.grouped_gemm import SortedRows, sort_rows_by_group
from miles.kernels.runtime.triton_compat import (
    HAVE_TRITON,
    device_guard,
    gdc_launch_dependents,
    gdc_wait,
    jit,
    pdl_options,
    tl,
    triton,
)

# With more rows than this a sort is faster.
_MAX_ROWS = 1 << 15


def sort_by_expert(groups_Tk: Tensor, num_groups: int) -> SortedRows:
    """As ``moe.grouped_gemm.sort_rows_by_group``: tokens in order within a group, without a device sync."""
    rows = groups_Tk.numel()
    if not (groups_Tk.is_cuda and HAVE_TRITON and 0 < rows <= _MAX_ROWS):
        return sort_rows_by_group(groups_Tk, num_groups)
    return launch_sort(groups_Tk.contiguous(), num_groups)


def launch_sort(groups_Tk: Tensor, num_groups: int) -> SortedRows:
    """``sort_by_expert`` in Triton."""
    rows = groups_Tk.numel()
    order_R, place_R, group_R = (torch.empty(rows, dtype=torch.int64, device=groups_Tk.device) for _ in range(3))
    ends_E = torch.empty(num_groups, dtype=torch.int32, device=groups_Tk.device)
    with device_guard(groups_Tk):
        tensors = (groups_Tk, order_R, place_R, group_R, ends_E)
        _sort_kernel[(num_groups,)](
            *tensors,
            rows,
            BLOCK=min(triton.next_power_of_2(rows), 2048),
            num_warps=4,
            **pdl_options(groups_Tk.device),
        )
    return SortedRows(order_R, place_R, group_R, ends_E, groups_Tk.shape[-1])


@jit
def _sort_kernel(
    groups_ptr: tl.tensor,
    order_ptr: tl.tensor,
    place_ptr: tl.tensor,
    group_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    rows: tl.tensor,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """One group's rows, after the rows of all earlier groups."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    group = tl.program_id(0).to(tl.int64)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        row_B = start + tl.arange(0, BLOCK)
        group_B = tl.load(groups_ptr + row_B, row_B < rows, other=group)
        before += (group_B < group).to(tl.int32)
    next_index = tl.sum(before, 0)
    for start in range(0, rows, BLOCK):
        row_B = start + tl.arange(0, BLOCK)
        group_B = tl.load(groups_ptr + row_B, row_B < rows, other=-1)
        is_mine_B = (group_B == group).to(tl.int32)
        index_B = next_index + tl.cumsum(is_mine_B, 0) - 1
        tl.store(order_ptr + index_B, row_B.to(tl.int64), is_mine_B > 0)
        tl.store(place_ptr + row_B, index_B.to(tl.int64), is_mine_B > 0)
        tl.store(group_ptr + index_B, group, is_mine_B > 0)
        next_index += tl.sum(is_mine_B, 0)
    tl.store(ends_ptr + group, next_index)
