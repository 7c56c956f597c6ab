"""Grouped GEMM and token permutation for MoE: rows sorted by expert, each group with its own weight.

Shapes: T tokens, k groups per token, R = T * k rows sorted by group, E groups, N out, K in, D features. The backward of
every gather is a gather too, so results do not depend on the order in which threads add.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from miles.kernels.moe.token_permutation import CombineFunction, sum_choices
from miles.kernels.runtime.triton_compat import use_triton_training


@dataclass(frozen=True, slots=True)
class SortedRows:
    """A permutation of rows sorted by group: sorted row r is flat row ``order_R[r]``; flat row f is at ``place_R[f]``.

    ``group_R`` is each sorted row's group; ``ends_E`` are the cumulative group sizes.
    """

    order_R: Tensor
    place_R: Tensor
    group_R: Tensor
    ends_E: Tensor
    per_token: int


RowAdapter = Callable[[Tensor, Tensor, SortedRows], Tensor]
"""Called with output and input of a grouped GEMM; returns the output with what LoRA adapters add, or the same with
gradients to factors that are merged into the weight.
"""


class ExchangeHandle(Protocol):
    """A started all-to-all of rows to the ranks of their groups and back, whose sizes are still in flight."""

    def __call__(self, x_RD: Tensor, work: Callable[[Tensor, SortedRows], Tensor]) -> Tensor:
        """Apply ``work`` to each row on the rank of its group; returns rows in the given order, possibly with other
        features.

        ``work`` gets the rows of all ranks for the groups of this one.
        """
        ...


class ExpertExchange(Protocol):
    """Expert parallelism: each rank has an equal, consecutive share of the groups.

    All ``world`` ranks open an exchange together and run it, in forward and in backward; a rank may send or receive no
    rows.
    """

    world: int

    def open(self, rows: SortedRows) -> ExchangeHandle:
        """Announce these rows, sorted by all ranks' groups, to the other ranks; does not wait for the device."""
        ...


def sort_rows_by_group(groups_Tk: Tensor, num_groups: int) -> SortedRows:
    """Sort the rows (token, choice) by group, tokens in order within a group; does not wait for the device."""
    sorted_R, order_R = groups_Tk.flatten().sort(stable=True)
    place_R = torch.empty_like(order_R)
    place_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    groups_E = torch.arange(num_groups, device=sorted_R.device, dtype=sorted_R.dtype)
    ends_E = torch.searchsorted(sorted_R, groups_E, right=True, out_int32=True)
    return SortedRows(order_R, place_R, sorted_R, ends_E, groups_Tk.shape[-1])


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows: SortedRows) -> Tensor:
        ctx.rows = rows
        return x_TD.index_select(0, rows.order_R // rows.per_token)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows: SortedRows = ctx.rows
        if use_triton_training(grad_RD):
            return sum_choices(grad_RD, None, rows.place_R, rows.per_token), None
        return grad_RD.index_select(0, rows.place_R).unflatten(0, (-1, rows.per_token)).sum(1), None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
        ctx.inverse_R = inverse_R
        return x_RD.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_RD.index_select(0, ctx.inverse_R), None, None


class _WeightedSum(torch.autograd.Function):
    """The weighted sum of each token's rows. The output is no view, so that hooks may be registered on it."""

    @staticmethod
    def forward(ctx: Any, x_TkD: Tensor, weights_Tk: Tensor) -> Tensor:
        ctx.save_for_backward(x_TkD, weights_Tk)
        out_TD = x_TkD.new_empty(len(x_TkD), x_TkD.shape[2])
        torch.bmm(weights_Tk.unsqueeze(1), x_TkD, out=out_TD.unsqueeze(1))
        return out_TD

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TkD, weights_Tk = ctx.saved_tensors
        grad_x = weights_Tk.unsqueeze(2) * grad_TD.unsqueeze(1) if ctx.needs_input_grad[0] else None
        grad_weights = torch.bmm(x_TkD, grad_TD.unsqueeze(2)).squeeze(2) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weights


def permute(x_RD: Tensor, index_R: Tensor, inverse_R: Tensor) -> Tensor:
    """Rows ``index_R``, each row once; ``inverse_R`` is the inverse permutation."""
    return _Permute.apply(x_RD, index_R, inverse_R)  # pyright: ignore[reportReturnType]


def dispatch(x_TD: Tensor, rows: SortedRows) -> Tensor:
    """One copy of a token for each of its groups, sorted by group."""
    return _Dispatch.apply(x_TD, rows)  # pyright: ignore[reportReturnType]


def scale_rows(x_RD: Tensor, weights_Tk: Tensor, rows: SortedRows) -> Tensor:
    """Each sorted row times the weight of its choice."""
    weights_R = permute(weights_Tk.flatten(), rows.order_R, rows.place_R)
    return x_RD * weights_R.unsqueeze(-1)


def combine_rows(x_RD: Tensor, weights_Tk: Tensor | None, rows: SortedRows) -> Tensor:
    """The sum of each token's rows, weighted if there are weights, in the order of its choices."""
    if weights_Tk is not None and use_triton_training(x_RD):
        return CombineFunction.apply(x_RD, weights_Tk, rows.order_R, rows.place_R)  # pyright: ignore[reportReturnType]
    flat_RD = permute(x_RD, rows.place_R, rows.order_R)
    if weights_Tk is None:
        return flat_RD.unflatten(0, (-1, rows.per_token)).sum(1)
    return _WeightedSum.apply(flat_RD.unflatten(0, weights_Tk.shape), weights_Tk)  # pyright: ignore[reportReturnType]


class _LoopedGemm(torch.autograd.Function):
    """Reference: one matmul per group that has rows."""

    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_ENK: Tensor, sizes: list[int]) -> Tensor:
        ctx.save_for_backward(x_RK, weight_ENK)
        ctx.sizes = sizes
        out_RN = x_RK.new_empty(len(x_RK), weight_ENK.shape[1])
        for x_K, weight_NK, out_N in zip(x_RK.split(sizes), weight_ENK.unbind(), out_RN.split(sizes), strict=True):
            if len(x_K):
                torch.mm(x_K, weight_NK.t(), out=out_N)
        return out_RN

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_RK, weight_ENK = ctx.saved_tensors
        grads = grad_RN.split(ctx.sizes)
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.empty_like(x_RK)
            for grad_N, weight_NK, out_K in zip(grads, weight_ENK.unbind(), grad_x.split(ctx.sizes), strict=True):
                if len(grad_N):
                    torch.mm(grad_N, weight_NK, out=out_K)
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros_like(weight_ENK)
            for grad_N, x_K, out_NK in zip(grads, x_RK.split(ctx.sizes), grad_weight.unbind(), strict=True):
                if len(grad_N):
                    torch.mm(grad_N.t(), x_K, out=out_NK)
        return grad_x, grad_weight, None


class _AddBias(torch.autograd.Function):
    """Each row plus its group's bias. The bias gradient is a matmul, whose summation order is fixed."""

    @staticmethod
    def forward(ctx: Any, x_RN: Tensor, bias_EN: Tensor, group_R: Tensor) -> Tensor:
        ctx.group_R, ctx.groups = group_R, len(bias_EN)
        return x_RN + bias_EN.index_select(0, group_R)

    @staticmethod
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor, Tensor | None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not ctx.needs_input_grad[1]:
            return grad_RN, None, None
        group_R: Tensor = ctx.group_R
        groups_E1 = torch.arange(ctx.groups, device=group_R.device, dtype=group_R.dtype).unsqueeze(1)
        return grad_RN, (group_R == groups_E1).to(grad_RN.dtype) @ grad_RN, None


def grouped_linear(x_RK: Tensor, weight_ENK: Tensor, rows: SortedRows, bias_EN: Tensor | None = None) -> Tensor:
    """Each row times its group's weight, plus its bias. On CUDA in bfloat16 one kernel, without a device sync."""
    out_RN = _grouped_matmul(x_RK, weight_ENK, rows)
    return out_RN if bias_EN is None else _AddBias.apply(out_RN, bias_EN, rows.group_R)  # pyright: ignore[reportReturnType]


def supports_grouped_mm(x_RK: Tensor, weight_ENK: Tensor) -> bool:
    """Whether torch's grouped GEMM applies, so that the host need not know the group sizes."""
    is_aligned = weight_ENK.shape[1] % 8 == 0 and weight_ENK.shape[2] % 8 == 0
    return x_RK.is_cuda and x_RK.dtype == torch.bfloat16 and is_aligned


def _grouped_matmul(x_RK: Tensor, weight_ENK: Tensor, rows: SortedRows) -> Tensor:
    if supports_grouped_mm(x_RK, weight_ENK) and len(x_RK):
        return torch._grouped_mm(x_RK, weight_ENK.transpose(1, 2), offs=rows.ends_E)  # pyright: ignore[reportPrivateImportUsage]
    ends = rows.ends_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return _LoopedGemm.apply(x_RK, weight_ENK, sizes)  # pyright: ignore[reportReturnType]
