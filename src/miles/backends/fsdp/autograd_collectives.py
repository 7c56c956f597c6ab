"""Differentiable collectives of tensor and sequence parallelism.

Each is named for its forward; its backward follows from which rank has which part of the gradient.

Shapes: n rows of one rank, N = world * n.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor


class CollectiveGroup(Protocol):
    """A process group as one rank sees it; its operations are not differentiable."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def sum(self, x: Tensor) -> Tensor: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def reduce_scatter(self, x: Tensor) -> Tensor: ...


Collective = Callable[[Tensor, CollectiveGroup], Tensor]


def copy_to_parallel_region(x: Tensor, group: CollectiveGroup) -> Tensor:
    """Identity; each rank computes a partial result from it, so its gradient is all-reduced."""
    return _apply(x, group, forward=_identity, backward=_all_reduce)


def reduce_from_parallel_region(x: Tensor, group: CollectiveGroup) -> Tensor:
    """All-reduce of partial results; every rank continues identically, so the gradient is passed through."""
    return _apply(x, group, forward=_all_reduce, backward=_identity)


def all_reduce_with_grad(x: Tensor, group: CollectiveGroup) -> Tensor:
    """All-reduce whose result each rank uses differently: the gradient is all-reduced too."""
    return _apply(x, group, forward=_all_reduce, backward=_all_reduce)


def gather_from_sequence_region(x_n: Tensor, group: CollectiveGroup) -> Tensor:
    """All-gather of rows, from which each rank computes a partial result: the gradient is reduce-scattered."""
    return _apply(x_n, group, forward=_all_gather, backward=_reduce_scatter)


def reduce_scatter_to_sequence_region(x_N: Tensor, group: CollectiveGroup) -> Tensor:
    """Reduce-scatter of partial results: the gradient is all-gathered."""
    return _apply(x_N, group, forward=_reduce_scatter, backward=_all_gather)


def gather_replicated(x_n: Tensor, group: CollectiveGroup) -> Tensor:
    """All-gather of rows with which every rank continues identically: the gradient is sliced."""
    return _apply(x_n, group, forward=_all_gather, backward=_slice)


def _apply(x: Tensor, group: CollectiveGroup, *, forward: Collective, backward: Collective) -> Tensor:
    return x if group.world == 1 else _Collective.apply(x, group, forward, backward)  # pyright: ignore[reportReturnType]


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: CollectiveGroup, forward: Collective, backward: Collective) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.backward_collective(grad, ctx.group), None, None, None


def _identity(x: Tensor, group: CollectiveGroup) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: CollectiveGroup) -> Tensor:
    return group.sum(x.clone())


def _all_gather(x: Tensor, group: CollectiveGroup) -> Tensor:
    return group.all_gather(x)


def _reduce_scatter(x: Tensor, group: CollectiveGroup) -> Tensor:
    return group.reduce_scatter(x)


def _slice(x: Tensor, group: CollectiveGroup) -> Tensor:
    return x.chunk(group.world)[group.rank]
