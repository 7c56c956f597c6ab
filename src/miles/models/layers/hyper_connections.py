"""Manifold-constrained hyper-connections (mHC): several residual streams instead of one, mixed by learned weights.

A mixer or feed-forward part reads a weighted sum of the streams; its output is added to each of them with a weight of
its own, after they are mixed by a matrix that Sinkhorn's iterations make doubly stochastic. All weights depend on the
token.

Shapes: T tokens, S streams, D hidden, W = 2S + SS weights of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from miles.kernels.batch_invariant import activation as invariant_activation
from miles.kernels.batch_invariant.elementwise import softmax, sum_in_order, weighted_sum
from miles.kernels.batch_invariant.linear import linear as invariant_linear
from miles.kernels.numerics import FAST, Numerics
from miles.models.layers.norm import unit_rms_norm
from miles.models.residual_spec import HyperConnectionSpec
from miles.models.spec import DecoderSpec

Mixing = tuple[Tensor, Tensor]
"""The weights of the output [T, S], and the matrices that mix the streams [T, S, S], in the model's dtype."""


class HyperConnection(nn.Module):
    """What one mixer or feed-forward part reads of the streams, and how its output joins them."""

    def __init__(
        self,
        spec: HyperConnectionSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics = FAST,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.norm_eps = model.norm_eps
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty(spec.num_weights, spec.streams * model.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(spec.num_weights, **factory))
        self.scale = nn.Parameter(torch.empty(3, **factory))

    def forward(self, x_TSD: Tensor) -> tuple[Tensor, Mixing]:
        """Return the sum of the streams that the part reads, and what ``join`` needs."""
        count, dtype = self.spec.streams, x_TSD.dtype
        settings = (self.spec, self.norm_eps, self.numerics)
        weights_TW = _MixingWeights.apply(x_TSD, self.fn, self.base, self.scale, *settings)
        assert isinstance(weights_TW, Tensor)
        read_TS, write_TS, mix_TSS = weights_TW.split((count, count, count * count), -1)
        read_TD = _sum_streams(read_TS, x_TSD, self.numerics)
        return read_TD, (write_TS.to(dtype), mix_TSS.unflatten(-1, (count, count)).to(dtype))

    def join(self, out_TD: Tensor, x_TSD: Tensor, mixing: Mixing) -> Tensor:
        """Return the streams behind the part."""
        write_TS, mix_TSS = mixing
        if self.numerics.batch_invariant:
            return _join_invariant(out_TD, x_TSD, write_TS, mix_TSS)
        return torch.baddbmm(write_TS.unsqueeze(-1) * out_TD.unsqueeze(1), mix_TSS.transpose(1, 2), x_TSD)


class HyperHead(nn.Module):
    """Joins the streams behind the last layer: their sum by weights that depend on the token."""

    def __init__(
        self,
        spec: HyperConnectionSpec,
        model: DecoderSpec,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics = FAST,
    ) -> None:
        super().__init__()
        self.eps, self.norm_eps = spec.eps, model.norm_eps
        self.numerics = numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty(spec.streams, spec.streams * model.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(spec.streams, **factory))
        self.scale = nn.Parameter(torch.empty(1, **factory))

    def forward(self, x_TSD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TSD.dtype, torch.float32)
        logits_TS = _project_streams(x_TSD, self.fn, self.norm_eps, self.numerics)
        weights_TS = _sigmoid(logits_TS * self.scale.to(wide) + self.base.to(wide), self.numerics) + self.eps
        return _sum_streams(weights_TS, x_TSD, self.numerics)


def mean_streams(x_TSD: Tensor, numerics: Numerics) -> Tensor:
    """Return the mean of the streams, [T, D]."""
    if not numerics.batch_invariant:
        return x_TSD.mean(1)
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    return (sum_in_order(x_TSD.to(wide).unbind(1)) / x_TSD.shape[1]).to(x_TSD.dtype)


def _sum_streams(weights_TS: Tensor, x_TSD: Tensor, numerics: Numerics) -> Tensor:
    """Return the weighted sum of the streams, [T, D], rounded once."""
    if numerics.batch_invariant:
        return weighted_sum(weights_TS, x_TSD.to(weights_TS.dtype)).to(x_TSD.dtype)
    return (weights_TS.unsqueeze(-1) * x_TSD).sum(1).to(x_TSD.dtype)


def _join_invariant(out_TD: Tensor, x_TSD: Tensor, write_TS: Tensor, mix_TSS: Tensor) -> Tensor:
    """Return the streams behind a part, stream by stream; each is summed in float32 and rounded once."""
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    terms_TND = torch.cat((out_TD.unsqueeze(1), x_TSD), 1).to(wide)
    weights_TSN = torch.cat((write_TS.unsqueeze(-1), mix_TSS.transpose(1, 2)), -1).to(wide)
    return torch.stack([weighted_sum(weights_TN, terms_TND) for weights_TN in weights_TSN.unbind(1)], 1).to(x_TSD.dtype)


def _project_streams(x_TSD: Tensor, fn: Tensor, norm_eps: float, numerics: Numerics) -> Tensor:
    """Return the projection of the normalized streams of each token, in float32 at least."""
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    flat_TX = unit_rms_norm(x_TSD.flatten(1).to(wide), norm_eps, numerics)
    return (invariant_linear if numerics.batch_invariant else F.linear)(flat_TX, fn.to(wide))


def _sigmoid(x: Tensor, numerics: Numerics) -> Tensor:
    return invariant_activation.sigmoid(x) if numerics.batch_invariant else x.sigmoid()


class _MixingWeights(torch.autograd.Function):
    """Weights to read and to write, and matrices; saves its inputs and recomputes the iterations in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x_TSD: Tensor,
        fn: Tensor,
        base_W: Tensor,
        scale_3: Tensor,
        spec: HyperConnectionSpec,
        eps: float,
        numerics: Numerics,
    ) -> Tensor:
        ctx.save_for_backward(x_TSD, fn, base_W, scale_3)
        ctx.settings = spec, eps, numerics
        return _compute_weights(x_TSD, fn, base_W, scale_3, spec, eps, numerics)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            x_TSD, fn, base_W, scale_3 = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            inputs = (x_TSD, fn, base_W, scale_3)
            weights_TW = _compute_weights(x_TSD, fn, base_W, scale_3, *ctx.settings)
        return (*torch.autograd.grad(weights_TW, inputs, grad_TW), None, None, None)


def _compute_weights(
    x_TSD: Tensor,
    fn: Tensor,
    base_W: Tensor,
    scale_3: Tensor,
    spec: HyperConnectionSpec,
    norm_eps: float,
    numerics: Numerics,
) -> Tensor:
    """Return all weights of each token, in float32 at least."""
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    count, eps = spec.streams, spec.eps
    logits_TW = _project_streams(x_TSD, fn, norm_eps, numerics)
    sizes = (count, count, count * count)
    scale_W = torch.cat([scale.expand(size) for scale, size in zip(scale_3.to(wide).split(1), sizes, strict=True)])
    logits_TW = logits_TW * scale_W + base_W.to(wide)
    read_TS, write_TS, mix_TSS = logits_TW.split(sizes, -1)
    mix_TSS = mix_TSS.unflatten(-1, (count, count))
    mix_TSS = (softmax(mix_TSS) if numerics.batch_invariant else mix_TSS.softmax(-1)) + eps
    mix_TSS = mix_TSS / (_sum_along(mix_TSS, -2, numerics) + eps)
    for _ in range(spec.iterations - 1):
        mix_TSS = mix_TSS / (_sum_along(mix_TSS, -1, numerics) + eps)
        mix_TSS = mix_TSS / (_sum_along(mix_TSS, -2, numerics) + eps)
    read_TS, write_TS = _sigmoid(read_TS, numerics) + eps, 2 * _sigmoid(write_TS, numerics)
    return torch.cat((read_TS, write_TS, mix_TSS.flatten(1)), -1)


def _sum_along(x: Tensor, dim: int, numerics: Numerics) -> Tensor:
    """Return the sum over a dimension, which is kept."""
    return sum_in_order(x.split(1, dim)) if numerics.batch_invariant else x.sum(dim, keepdim=True)
