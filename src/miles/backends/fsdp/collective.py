"""Sums, gathers and cuts between ranks that a gradient flows through.

Each is named for its way forward; what its gradient does on the way back follows from who has which summand of it.

Shapes: n rows of one rank, N = world * n.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Ring(Protocol):
    """Some of the ranks, seen from one of them; nothing of it is differentiable."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...


def entered(x: Tensor, ring: Ring) -> Tensor:
    """``x`` itself; each rank makes a summand of the result out of it, so its gradient is the sum of theirs."""
    return x if ring.world == 1 else _Entered.apply(x, ring)  # pyright: ignore[reportReturnType]


def summed(x: Tensor, ring: Ring) -> Tensor:
    """The sum of the ranks' summands; every rank does the same with it, so its gradient is each summand's."""
    return x if ring.world == 1 else _Summed.apply(x, ring)  # pyright: ignore[reportReturnType]


def summed_within(x: Tensor, ring: Ring) -> Tensor:
    """The sum over the ranks, of which each makes something else: gradients are added up as well."""
    return x if ring.world == 1 else _SummedWithin.apply(x, ring)  # pyright: ignore[reportReturnType]


def rows_gathered(x_n: Tensor, ring: Ring) -> Tensor:
    """All ranks' rows, of which each makes a summand of the result: a row's gradient is the sum over the ranks."""
    return x_n if ring.world == 1 else _RowsGathered.apply(x_n, ring)  # pyright: ignore[reportReturnType]


def rows_summed(x_N: Tensor, ring: Ring) -> Tensor:
    """Some rows of the sum of the ranks' summands: gradients of all rows are every summand's."""
    return x_N if ring.world == 1 else _RowsSummed.apply(x_N, ring)  # pyright: ignore[reportReturnType]


def rows_joined(x_n: Tensor, ring: Ring) -> Tensor:
    """All ranks' rows, with which every rank does the same: of their gradient the own part comes back."""
    return x_n if ring.world == 1 else _RowsJoined.apply(x_n, ring)  # pyright: ignore[reportReturnType]


class _Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ring.sum(grad.clone()), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        return ring.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None


class _SummedWithin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.sum(x.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ring.sum(grad.clone()), None


class _RowsGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_n: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.all_gather(x_n)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ring.reduce_scatter(grad_N), None


class _RowsSummed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_N: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.reduce_scatter(x_N)

    @staticmethod
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.ring.all_gather(grad_n), None


class _RowsJoined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_n: Tensor, ring: Ring) -> Tensor:
        ctx.ring = ring
        return ring.all_gather(x_n)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: Ring = ctx.ring
        return grad_N.chunk(ring.world)[ring.rank], None
