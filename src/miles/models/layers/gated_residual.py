"""Gated hyper-connections (GatedResidual): several residual streams, read through a gate of each channel.

A part reads the mean of the normalized streams, each channel of each stream multiplied by a gate that comes from all of
them; its output is added to every stream with a weight of its own. Gates and weights depend on the token.

Shapes: T tokens, S streams, D hidden, X = S * D, r rank of the gates.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.batch_invariant.linear import linear as invariant_linear
from miles.kernels.numerics import Numerics
from miles.models.layers.hyper_connections import mean_streams
from miles.models.layers.norm import RMSNorm, unit_rms_norm
from miles.models.layers.recurrent_ops import sigmoid, silu
from miles.models.residual_spec import GatedResidualSpec
from miles.models.spec import DecoderSpec


class _Settings(NamedTuple):
    eps: float
    offset: float
    numerics: Numerics


class StreamNorm(RMSNorm):
    """RMSNorm of each residual stream by itself, with a weight of each channel of each stream."""

    def __init__(
        self,
        streams: int,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        width = model.hidden_size
        options: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        super().__init__(streams * width, model.norm_eps, offset=model.norm_offset, **options)

    def forward(self, x: Tensor) -> Tensor:
        return _normalize_streams(x, self.weight, self.settings)

    @property
    def settings(self) -> _Settings:
        """What the norm of streams and all that follows it need beside tensors."""
        return _Settings(self.eps, self.offset, self.numerics)


class GatedResidual(nn.Module):
    """What one mixer or feed-forward part reads of the streams, and how its output joins them."""

    def __init__(
        self,
        spec: GatedResidualSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
        writes: bool = True,
    ) -> None:
        super().__init__()
        self.spec = spec
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        width = spec.streams * model.hidden_size
        self.norm = StreamNorm(spec.streams, model, **factory, numerics=numerics)
        self.down = nn.Parameter(torch.empty(spec.rank, width, **factory))
        self.up = nn.Parameter(torch.empty(width, spec.rank, **factory))
        self.inject = nn.Parameter(torch.empty(spec.streams, width, **factory)) if writes else None

    def forward(self, x_TSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states that the part reads, and the weight of its output in each stream, [T, S]."""
        norm = self.norm
        both = _ReadStreams.apply(x_TSD, norm.weight, self.down, self.up, self.inject, norm.settings)
        read_TD, write_TS = both  # pyright: ignore[reportGeneralTypeIssues]
        return read_TD, write_TS

    def join(self, out_TD: Tensor, x_TSD: Tensor, write_TS: Tensor) -> Tensor:
        """Return the streams behind the part."""
        if not self.norm.numerics.batch_invariant:
            return torch.addcmul(x_TSD, out_TD.unsqueeze(1), write_TS.unsqueeze(-1))
        # On a CPU ``addcmul`` rounds once or twice, depending on where an element is.
        wide = torch.promote_types(x_TSD.dtype, torch.float32)
        written_TSD = out_TD.unsqueeze(1).to(wide) * write_TS.unsqueeze(-1).to(wide)
        return (x_TSD.to(wide) + written_TSD).to(x_TSD.dtype)


class GatedResidualHead(GatedResidual):
    """Reads the streams behind the last layer."""

    def __init__(
        self,
        spec: GatedResidualSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__(spec, model, device=device, dtype=dtype, numerics=numerics, writes=False)

    def forward(self, x_TSD: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x_TSD)[0]


class _ReadStreams(torch.autograd.Function):
    """Saves its inputs only, and computes everything between again in backward: streams are wide."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TSD: Tensor,
        weight_X: Tensor,
        down_rX: Tensor,
        up_Xr: Tensor,
        inject_SX: Tensor | None,
        settings: _Settings,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x_TSD, weight_X, down_rX, up_Xr, inject_SX)
        ctx.settings = settings
        return _read_streams(x_TSD, weight_X, down_rX, up_Xr, inject_SX, settings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor, grad_TS: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            inputs: list[Any] = [
                None if x is None else x.detach().requires_grad_(needed)
                for x, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=False)
            ]
            x_TSD, weight_X, down_rX, up_Xr, inject_SX = inputs
            outputs = _read_streams(x_TSD, weight_X, down_rX, up_Xr, inject_SX, ctx.settings)
        trained = [x for x in inputs if x is not None and x.requires_grad]
        # Without weights to write the second output depends on nothing.
        grads = [(out, grad) for out, grad in zip(outputs, (grad_TD, grad_TS), strict=True) if out.requires_grad]
        found = iter(torch.autograd.grad([out for out, _ in grads], trained, [grad for _, grad in grads]))
        return (*(next(found) if x is not None and x.requires_grad else None for x in inputs), None)


def _normalize_streams(x_TSD: Tensor, weight_X: Tensor, settings: _Settings) -> Tensor:
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    scale_SD = (weight_X.to(wide) + settings.offset).view(x_TSD.shape[1:])
    unit_TSD = unit_rms_norm(x_TSD.to(wide).flatten(0, 1), settings.eps, settings.numerics).view(x_TSD.shape)
    return (unit_TSD * scale_SD).to(x_TSD.dtype)


def _read_streams(
    x_TSD: Tensor, weight_X: Tensor, down_rX: Tensor, up_Xr: Tensor, inject_SX: Tensor | None, settings: _Settings
) -> tuple[Tensor, Tensor]:
    """Return what is read of the streams, and the weights to write each (none without ``inject_SX``)."""
    streams, numerics = x_TSD.shape[1], settings.numerics
    project = invariant_linear if numerics.batch_invariant else F.linear
    normed_TSD = _normalize_streams(x_TSD, weight_X, settings)
    flat_TX = normed_TSD.flatten(1)
    low_Tr = silu(project(flat_TX, down_rX) / streams, numerics)
    gates_TSD = sigmoid(project(low_Tr, up_Xr), numerics).view(x_TSD.shape)
    read_TD = mean_streams(gates_TSD * normed_TSD, numerics)
    if inject_SX is None:
        return read_TD, x_TSD.new_zeros(len(x_TSD), 0)
    return read_TD, 2 * sigmoid(project(flat_TX, inject_SX) / streams, numerics)
