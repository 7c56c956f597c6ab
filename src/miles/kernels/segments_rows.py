"""Rows taken any number of times, with gradients whose sums have one order.

Shapes: M rows there are, P rows taken, c copies added up at once, n rows that have so many, x whatever a row is.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Copies added up at once: fewer calls, and not much more memory.
_AT_ONCE = 8


class Copies:
    """Which of ``rows`` rows each slot takes; slots that are not ``real_P`` are padding and give no gradient.

    A row's gradient is the sum over its copies. It is added up in rounds, each of some copies of all rows that have as
    many: these stand before rows that have fewer, so that a round is a gather and a sum into the first rows, and no
    two sums meet.
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
        place_M = np.empty_like(order_M)
        place_M[order_M] = np.arange(rows)
        copies = range(int(count_M.max(initial=0)))

        def put(index: NDArray[np.int64]) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(index, np.int64)).to(device)

        self.rows = rows
        self.same = len(slots) == rows and np.array_equal(row_P, np.arange(rows))
        if not self.same:
            self.row_P = put(row_P)
            self.rounds: list[Tensor] = []
            for (n, _), some in groupby(copies, key=lambda c: (int((count_M > c).sum()), c // _AT_ONCE)):
                self.rounds.append(put(by_row[first_M[order_M[:n]] + np.array(list(some))[:, None]]))
            self.place_M = None if np.array_equal(place_M, np.arange(rows)) else put(place_M)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Mx: Tensor, copies: Copies) -> Tensor:
        ctx.copies = copies
        return x_Mx.index_select(0, copies.row_P)

    @staticmethod
    def backward(ctx: Any, grad_Px: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        copies: Copies = ctx.copies
        rounds = copies.rounds
        if len(rounds) == 1 and rounds[0].shape == (1, copies.rows):
            sum_Mx = grad_Px.index_select(0, rounds[0][0])
        else:
            # Many summands of half precision would lose what each of them brings.
            wide = torch.promote_types(grad_Px.dtype, torch.float32)
            sum_Mx = grad_Px.new_zeros(copies.rows, *grad_Px.shape[1:], dtype=wide)
            for slots_cn in rounds:
                found_cnx = grad_Px.index_select(0, slots_cn.flatten()).unflatten(0, slots_cn.shape)
                sum_Mx[: slots_cn.shape[1]] += found_cnx.sum(0, dtype=wide)
        out_Mx = sum_Mx if copies.place_M is None else sum_Mx.index_select(0, copies.place_M)
        return out_Mx.to(grad_Px.dtype), None


def take(x_Mx: Tensor, copies: Copies) -> Tensor:
    """The rows that ``copies`` says, [P, x]."""
    assert len(x_Mx) == copies.rows, f"{len(x_Mx)} rows where {copies.rows} were laid out"
    return x_Mx if copies.same else _Take.apply(x_Mx, copies)  # pyright: ignore[reportReturnType]


class _Pick(torch.autograd.Function):
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
            # This one sorts before it adds; the plain sum into rows takes them as they come.
            sum_Mx.index_put_((row_P,), wide_Px, accumulate=True)
        else:
            sum_Mx.index_add_(0, row_P, wide_Px)
        return sum_Mx.to(grad_Px.dtype), None


def pick(x_Mx: Tensor, row_P: Tensor, *, repeated: bool = True) -> Tensor:
    """The rows ``row_P``, which are known on the device alone; is any of them ``repeated``?"""
    return _Pick.apply(x_Mx, row_P) if repeated else x_Mx.index_select(0, row_P)  # pyright: ignore[reportReturnType]
