"""Row gather with repetition and a deterministic backward, whose sums have a fixed order.

Shapes: M source rows, P gathered rows, c copies added at once, n rows that have as many copies, x the shape of a row.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Copies added at once: fewer kernel launches for little more memory.
_COPIES_PER_ROUND = 8


class RowGather:
    """Which of ``rows`` source rows each gathered row copies; those not ``real_P`` are padding without gradient.

    The gradient of a source row is the sum over its copies. It is added in rounds, each of some copies of all rows that
    have as many: these are sorted before rows with fewer, so that a round is a gather and an add into the first rows,
    without write conflicts.
    """

    def __init__(
        self,
        row_P: NDArray[np.int64],
        rows: int,
        device: torch.device | str,
        *,
        real_P: NDArray[np.bool_] | None = None,
    ) -> None:
        slots = np.arange(len(row_P)) if real_P is None else np.flatnonzero(real_P)
        by_row = slots[np.argsort(row_P[slots], kind="stable")]
        count_M = np.bincount(row_P[slots], minlength=rows)
        first_M = np.cumsum(count_M) - count_M
        order_M = np.argsort(-count_M, kind="stable")
        inverse_M = np.empty_like(order_M)
        inverse_M[order_M] = np.arange(rows)
        gather = range(int(count_M.max(initial=0)))

        def to_device(index: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(device)

        self.rows = rows
        self.is_identity = len(slots) == rows and np.array_equal(row_P, np.arange(rows))
        if not self.is_identity:
            self.row_P = to_device(row_P)
            self.rounds: list[Tensor] = []
            for (n, _), copy_group in groupby(gather, key=lambda c: (int((count_M > c).sum()), c // _COPIES_PER_ROUND)):
                self.rounds.append(to_device(by_row[first_M[order_M[:n]] + np.array(list(copy_group))[:, None]]))
            self.inverse_M = None if np.array_equal(inverse_M, np.arange(rows)) else to_device(inverse_M)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Mx: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        return x_Mx.index_select(0, gather.row_P)

    @staticmethod
    def backward(ctx: Any, grad_Px: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gather: RowGather = ctx.gather
        rounds = gather.rounds
        if len(rounds) == 1 and rounds[0].shape == (1, gather.rows):
            sum_Mx = grad_Px.index_select(0, rounds[0][0])
        else:
            # Half precision would lose small summands.
            wide = torch.promote_types(grad_Px.dtype, torch.float32)
            sum_Mx = grad_Px.new_zeros(gather.rows, *grad_Px.shape[1:], dtype=wide)
            for slots_cn in rounds:
                grads_cnx = grad_Px.index_select(0, slots_cn.flatten()).unflatten(0, slots_cn.shape)
                sum_Mx[: slots_cn.shape[1]] += grads_cnx.sum(0, dtype=wide)
        out_Mx = sum_Mx if gather.inverse_M is None else sum_Mx.index_select(0, gather.inverse_M)
        return out_Mx.to(grad_Px.dtype), None


def gather_rows(x_Mx: Tensor, gather: RowGather) -> Tensor:
    """Gather rows as planned by ``gather``, [P, x]."""
    assert len(x_Mx) == gather.rows, f"got {len(x_Mx)} rows for a gather of {gather.rows} rows"
    return x_Mx if gather.is_identity else _GatherRows.apply(x_Mx, gather)  # pyright: ignore[reportReturnType]


class _IndexRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Mx: Tensor, row_P: Tensor) -> Tensor:
        ctx.rows = len(x_Mx)
        ctx.save_for_backward(row_P)
        return x_Mx.index_select(0, row_P)

    @staticmethod
    def backward(ctx: Any, grad_Px: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (row_P,) = ctx.saved_tensors
        wide_Px = grad_Px.to(torch.promote_types(grad_Px.dtype, torch.float32))
        sum_Mx = wide_Px.new_zeros(ctx.rows, *grad_Px.shape[1:])
        if grad_Px.is_cuda:
            # index_put_ sorts the indices and is deterministic; index_add_ on CUDA is not.
            sum_Mx.index_put_((row_P,), wide_Px, accumulate=True)
        else:
            sum_Mx.index_add_(0, row_P, wide_Px)
        return sum_Mx.to(grad_Px.dtype), None


def index_rows(x_Mx: Tensor, row_P: Tensor, *, repeated: bool = True) -> Tensor:
    """Rows ``row_P`` (a device tensor), with a deterministic backward; ``repeated``: whether an index may repeat."""
    return _IndexRows.apply(x_Mx, row_P) if repeated else x_Mx.index_select(0, row_P)  # pyright: ignore[reportReturnType]
