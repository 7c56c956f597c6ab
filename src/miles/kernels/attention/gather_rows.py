"""Row gather with repetition and a deterministic backward, whose sums have a fixed order.

Shapes: M source rows, P gathered rows, c copies added at once, n rows that have as many copies, x the shape of a row, D
features of a row.
"""

from __future__ import annotations

from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.runtime.host_copy import copy_to_device
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton

# Copies added at once: fewer kernel launches for little more memory.
_COPIES_PER_ROUND = 8
# Features that a program of the Triton kernel adds.
_BLOCK = 1024


class RowGather:
    """Which of ``rows`` source rows each gathered row copies; those not ``real_P`` are padding without gradient.

    The gradient of a source row is the sum over its copies, in their order. A Triton kernel adds all copies of a row:
    those of row m are ``slots`` ``first_M[m]`` to ``first_M[m + 1]``. Without Triton they are added in rounds, each of
    some copies of all rows that have as many: these are sorted before rows with fewer, so that a round is a gather and
    an add into the first rows, without write conflicts.
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
        self.rows = rows
        self.is_identity = len(slots) == rows and np.array_equal(row_P, np.arange(rows))
        if self.is_identity:
            return
        self._device = device
        self._by_row = slots[np.argsort(row_P[slots], kind="stable")]
        self._count_M = np.bincount(row_P[slots], minlength=rows)
        self.row_P = self._to_device(row_P)
        self.first_M = self._to_device(np.append(0, self._count_M.cumsum()))
        self.slots = self._to_device(self._by_row)

    @cached_property
    def rounds(self) -> list[Tensor]:
        """The slots that each round adds, [c, n]."""
        first_M, order_M = np.cumsum(self._count_M) - self._count_M, self._order_M
        copies = range(int(self._count_M.max(initial=0)))
        groups = groupby(copies, key=lambda c: (int((self._count_M > c).sum()), c // _COPIES_PER_ROUND))
        return [
            self._to_device(self._by_row[first_M[order_M[:n]] + np.array(list(group))[:, None]])
            for (n, _), group in groups
        ]

    @cached_property
    def inverse_M(self) -> Tensor | None:
        """Where each source row is in the order of the rounds; None if it is the same."""
        inverse_M = np.empty_like(self._order_M)
        inverse_M[self._order_M] = np.arange(self.rows)
        return None if np.array_equal(inverse_M, np.arange(self.rows)) else self._to_device(inverse_M)

    @cached_property
    def _order_M(self) -> NDArray[np.int64]:
        return np.argsort(-self._count_M, kind="stable")

    def _to_device(self, index: NDArray[np.int64]) -> Tensor:
        return copy_to_device(torch.from_numpy(np.ascontiguousarray(index, np.int64)), self._device)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Mx: Tensor, gather: RowGather) -> Tensor:
        ctx.gather = gather
        ctx.use_triton = use_triton(x_Mx)
        return x_Mx.index_select(0, gather.row_P)

    @staticmethod
    def backward(ctx: Any, grad_Px: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gather: RowGather = ctx.gather
        if ctx.use_triton:
            return sum_copies(grad_Px, gather), None
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


def sum_copies(grad_Px: Tensor, gather: RowGather) -> Tensor:
    """The sum over the copies of each source row, added in float32 and rounded once; a Triton kernel."""
    grad_PD = grad_Px.reshape(len(grad_Px), -1)
    grad_PD = grad_PD if grad_PD.stride(1) == 1 else grad_PD.contiguous()
    out_Mx = grad_Px.new_empty(gather.rows, *grad_Px.shape[1:])
    size = grad_PD.shape[1]
    if out_Mx.numel():
        block = min(triton.next_power_of_2(size), _BLOCK)
        with device_guard(grad_PD):
            _sum_copies_kernel[(gather.rows, triton.cdiv(size, block))](
                grad_PD,
                gather.first_M,
                gather.slots,
                out_Mx,
                grad_PD.stride(0),
                size,
                BLOCK=block,
                num_warps=max(1, min(block // 256, 4)),
            )
    return out_Mx


@jit
def _sum_copies_kernel(
    grad_ptr: tl.tensor,
    first_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    out_ptr: tl.tensor,
    stride: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid_D = column_D < size
    sum_D = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.load(first_ptr + row), tl.load(first_ptr + row + 1)):
        slot = tl.load(slots_ptr + index)
        sum_D += tl.load(grad_ptr + slot * stride + column_D, valid_D, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + column_D, sum_D, valid_D)


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
