"""Token dispatch of expert parallelism: tokens are sent to the ranks of their experts and back by all-to-all.

Shapes: R rows of this rank, sorted by expert; N rows received; W ranks; E experts of all ranks, e of one; D features.

    rank 0   sort by expert ─ counts ─┐ rows ─┐ sort by own expert ─ experts ─┐ rows back ─ weigh, sum over experts
    rank 1   sort by expert ─ counts ─┘ rows ─┘ sort by own expert ─ experts ─┘ rows back ─ weigh, sum over experts

The host waits for the device once per layer, for the counts, because they are the sizes of the receive buffers;
meanwhile the device copies the rows. Backward knows the sizes and does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from miles.kernels.moe.grouped_gemm import SortedRows, permute, sort_rows_by_group


class AllToAllGroup(Protocol):
    """The ranks that share the experts, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        ...


class AllToAllDispatcher:
    """Sends rows to the ranks that have their experts, and the results back."""

    def __init__(self, group: AllToAllGroup) -> None:
        self.world = group.world
        self._group = group

    def open(self, rows: SortedRows) -> TokenDispatch:
        count_E = torch.diff(rows.ends_E, prepend=rows.ends_E.new_zeros(1))
        each = [len(count_E) // self.world] * self.world
        coming_We = self._group.all_to_all(count_E, each, each).unflatten(0, (self.world, -1))
        return TokenDispatch(count_E.unflatten(0, (self.world, -1)), coming_We, self._group)


class TokenDispatch:
    """``counts_We`` rows go from here to each rank's experts, ``coming_We`` come from each rank to the experts here."""

    def __init__(self, counts_We: Tensor, coming_We: Tensor, group: AllToAllGroup) -> None:
        self._coming_We, self._group = coming_We, group
        # The only copy to the host. Work launched from here on overlaps with the host's wait.
        self._sizes = torch.stack((counts_We.sum(1), coming_We.sum(1))).to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(coming_We.device).record_event() if coming_We.is_cuda else None

    def __call__(self, x_RD: Tensor, work: Callable[[Tensor, SortedRows], Tensor]) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        sent, came = self._sizes.tolist()
        here = _sort_received_by_expert(self._coming_We, sum(came))
        x_ND = permute(all_to_all_rows(x_RD, sent, came, self._group), here.order_R, here.place_R)
        out_ND = permute(work(x_ND, here), here.place_R, here.order_R)
        return all_to_all_rows(out_ND, came, sent, self._group)


def _sort_received_by_expert(coming_We: Tensor, count: int) -> SortedRows:
    """Order ``count`` received rows by this rank's experts; rows of one expert by rank, then by token."""
    ranks, experts = coming_We.shape
    expert_We = torch.arange(experts, device=coming_We.device).repeat(ranks)
    expert_N = expert_We.repeat_interleave(coming_We.flatten(), output_size=count)
    return sort_rows_by_group(expert_N.unsqueeze(1), experts)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, sent: list[int], came: list[int], group: AllToAllGroup) -> Tensor:
        ctx.sent = sent
        ctx.came = came
        ctx.group = group
        return group.all_to_all(x_RD, sent, came)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        group: AllToAllGroup = ctx.group
        return group.all_to_all(grad_ND, ctx.came, ctx.sent), None, None, None


def all_to_all_rows(x_RD: Tensor, sent: list[int], came: list[int], group: AllToAllGroup) -> Tensor:
    """Differentiable all-to-all: ``sent`` rows go to each rank in order, ``came`` rows come from each."""
    return _AllToAll.apply(x_RD, sent, came, group)  # pyright: ignore[reportReturnType]
