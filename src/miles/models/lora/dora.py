"""DoRA: the gradient of magnitudes and factors of merged adapters, of projections and of routed experts.

The weight is m / |V| * V with V = W + scale * B A, row by row. |V| is a constant in the gradient of the factors.

Shapes: T tokens, I inputs, O outputs of a projection, N outputs of the fused projection, r rank, E experts, R rows
sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles.kernels.moe.grouped_gemm import SortedRows, grouped_linear

if TYPE_CHECKING:
    from miles.models.lora.adapters import TargetPart

__all__ = ["DoraAdapter", "ExpertDoraAdapter", "compute_dora_scale"]


def compute_dora_scale(magnitude_O: Tensor, norm_O: Tensor) -> Tensor:
    """Return what DoRA scales each row by; rows of padding stay zero."""
    return torch.where(norm_O == 0, torch.zeros_like(norm_O), magnitude_O / norm_O)


class _DoraGradient(torch.autograd.Function):
    """The same for DoRA: the gradient also goes to the magnitudes. ``bias_N`` is part of ``y``."""

    @staticmethod
    def forward(
        ctx: Any,
        y_TN: Tensor,
        x_TI: Tensor,
        bias_N: Tensor | None,
        scale: float,
        rows: tuple[tuple[int, int], ...],
        norms: tuple[Tensor, ...],
        *factors: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.rows = scale, rows
        ctx.norms, ctx.bias_N = norms, bias_N
        ctx.save_for_backward(y_TN, x_TI, *factors)
        return y_TN.view_as(y_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y, x, *factors = ctx.saved_tensors
        y_TN = y if ctx.bias_N is None else y - ctx.bias_N
        y_TN, x_TI, rows_TN = (t.reshape(-1, t.shape[-1]) for t in (y_TN, x, grad_TN))
        grads: list[Tensor] = []
        triples = zip(ctx.rows, ctx.norms, factors[::3], factors[1::3], factors[2::3], strict=True)
        for (start, stop), norm_O, a_rI, b_Or, magnitude_O in triples:
            dy_TO = rows_TN[:, start:stop]
            products_O = (dy_TO * y_TN[:, start:stop]).sum(0, dtype=torch.float32)
            dv_TO = dy_TO * compute_dora_scale(magnitude_O, norm_O).to(dy_TO.dtype)
            xa_Tr = x_TI @ a_rI.to(x_TI.dtype).T
            grads.append(((dv_TO @ b_Or.to(dv_TO.dtype)).T @ x_TI).to(a_rI.dtype).mul_(ctx.scale))
            grads.append((dv_TO.T @ xa_Tr).to(b_Or.dtype).mul_(ctx.scale))
            grads.append((products_O / magnitude_O).to(magnitude_O.dtype))
        return (grad_TN, None, None, None, None, None, *grads)


class _ExpertDoraGradient(torch.autograd.Function):
    """Identity of a grouped GEMM's output; its gradient also goes to factors and magnitudes of every expert."""

    @staticmethod
    def forward(
        ctx: Any,
        y_RN: Tensor,
        x_RI: Tensor,
        bias_EN: Tensor | None,
        scale: float,
        columns: tuple[tuple[int, int], ...],
        norms: tuple[Tensor, ...],
        rows: SortedRows,
        *factors: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.columns = scale, columns
        ctx.norms, ctx.bias_EN = norms, bias_EN
        ctx.rows = rows
        ctx.save_for_backward(y_RN, x_RI, *factors)
        return y_RN.view_as(y_RN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        y_RN, x_RI, *factors = ctx.saved_tensors
        rows: SortedRows = ctx.rows
        if ctx.bias_EN is not None:
            y_RN = y_RN - ctx.bias_EN[rows.group_R]
        counts_E = rows.ends_E.diff(prepend=rows.ends_E.new_zeros(1))
        grads: list[Tensor] = []
        triples = zip(ctx.columns, ctx.norms, factors[::3], factors[1::3], factors[2::3], strict=True)
        for (start, stop), norm_EO, a_ErI, b_EOr, magnitude_EO in triples:
            dy_RO = grad_RN[:, start:stop]
            products_RO = (dy_RO * y_RN[:, start:stop]).float()
            scale_EO = compute_dora_scale(magnitude_EO, norm_EO).to(dy_RO.dtype)
            dv_RO = (dy_RO * scale_EO[rows.group_R]).contiguous()
            with torch.enable_grad():
                a, b = (f.detach().to(x_RI.dtype).contiguous().requires_grad_() for f in (a_ErI, b_EOr))
                low_RO = grouped_linear(grouped_linear(x_RI, a, rows), b, rows)
            grad_a, grad_b = torch.autograd.grad(low_RO, (a, b), dv_RO)
            sums_EO = torch.segment_reduce(products_RO, "sum", lengths=counts_E.long(), axis=0, initial=0.0)
            grads.append(grad_a.to(a_ErI.dtype) * ctx.scale)
            grads.append(grad_b.to(b_EOr.dtype) * ctx.scale)
            grads.append((sums_EO / magnitude_EO).to(magnitude_EO.dtype))
        return (grad_RN, None, None, None, None, None, None, *grads)


class DoraAdapter:
    """The factors and magnitudes of the targets inside one decoder matrix, applied to that matrix's output."""

    def __init__(
        self,
        targets: Sequence[TargetPart],
        magnitudes: Sequence[Tensor],
        norms: Sequence[Tensor],
        scale: float,
        module: nn.Linear,
    ) -> None:
        self._targets, self._rows = tuple(targets), tuple(target.rows for target in targets)
        self._magnitudes, self._norms = tuple(magnitudes), tuple(norms)
        self._scale, self._module = scale, module

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        """Return ``y``, through which gradients also reach the factors and magnitudes."""
        if not torch.is_grad_enabled():
            return y_TN
        bias_N = None if self._module.bias is None else self._module.bias.detach()
        norms: list[Tensor] = []
        factors: list[Tensor] = []
        for target, magnitude_O, norm_O in zip(self._targets, self._magnitudes, self._norms, strict=True):
            if target.own_rows is not None:  # of a row of padding any will do: its output is zero
                own = target.own_rows.to(norm_O.device).clamp(min=0)
                magnitude_O, norm_O = magnitude_O.index_select(0, own), norm_O.index_select(0, own)
            norms.append(norm_O)
            factors += [*target.factors(), magnitude_O]
        return _DoraGradient.apply(y_TN, x_TI, bias_N, self._scale, self._rows, tuple(norms), *factors)  # pyright: ignore[reportReturnType]


class ExpertDoraAdapter:
    """The same for a stacked tensor of experts, applied to the output of its grouped GEMM; ``read_bias`` returns its
    bias, which ranks may hold in shards between forwards.
    """

    def __init__(
        self,
        targets: Sequence[TargetPart],
        magnitudes: Sequence[Tensor],
        norms: Sequence[Tensor],
        scale: float,
        read_bias: Callable[[], Tensor | None],
    ) -> None:
        self._targets = tuple(targets)
        self._magnitudes, self._norms = tuple(magnitudes), tuple(norms)
        self._scale, self._read_bias = scale, read_bias

    def __call__(self, y_RN: Tensor, x_RI: Tensor, rows: SortedRows) -> Tensor:
        """Return ``y``, through which gradients also reach the factors and magnitudes."""
        columns: list[tuple[int, int]] = []
        norms: list[Tensor] = []
        factors: list[Tensor] = []
        for target, magnitude_EO, norm_EO in zip(self._targets, self._magnitudes, self._norms, strict=True):
            assert target.experts is not None and isinstance(target.rows, tuple)
            own = slice(*target.experts)
            magnitude_EO, norm_EO = magnitude_EO[own], norm_EO[own]
            if target.own_rows is not None:  # of a row of padding any will do: its output is zero
                index = target.own_rows.to(norm_EO.device).clamp(min=0)
                magnitude_EO, norm_EO = magnitude_EO.index_select(1, index), norm_EO.index_select(1, index)
            columns.append(target.rows)
            norms.append(norm_EO)
            factors += [*target.factors(), magnitude_EO]
        bias_EN = self._read_bias()
        bias_EN = None if bias_EN is None else bias_EN.detach()
        return _ExpertDoraGradient.apply(  # pyright: ignore[reportReturnType]
            y_RN, x_RI, bias_EN, self._scale, tuple(columns), tuple(norms), rows, *factors
        )
