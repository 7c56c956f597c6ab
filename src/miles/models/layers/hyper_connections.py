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

from miles.models.spec import DecoderSpec, HyperConnectionSpec

Mixing = tuple[Tensor, Tensor]
"""The weights of the output [T, S], and the matrices that mix the streams [T, S, S], in the model's dtype."""


class HyperConnection(nn.Module):
    """What one mixer or feed-forward part reads of the streams, and how its output joins them."""

    def __init__(
        self, spec: HyperConnectionSpec, model: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.spec = spec
        self.norm_eps = model.norm_eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty(spec.num_weights, spec.streams * model.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(spec.num_weights, **factory))
        self.scale = nn.Parameter(torch.empty(3, **factory))

    def forward(self, x_TSD: Tensor) -> tuple[Tensor, Mixing]:
        """Return the sum of the streams that the part reads, and what ``join`` needs."""
        count, dtype = self.spec.streams, x_TSD.dtype
        weights_TW = _MixingWeights.apply(x_TSD, self.fn, self.base, self.scale, self.spec, self.norm_eps)
        assert isinstance(weights_TW, Tensor)
        read_TS, write_TS, mix_TSS = weights_TW.split((count, count, count * count), -1)
        read_TD = (read_TS.unsqueeze(-1) * x_TSD).sum(1).to(dtype)
        return read_TD, (write_TS.to(dtype), mix_TSS.unflatten(-1, (count, count)).to(dtype))

    def join(self, out_TD: Tensor, x_TSD: Tensor, mixing: Mixing) -> Tensor:
        """Return the streams behind the part."""
        write_TS, mix_TSS = mixing
        return torch.baddbmm(write_TS.unsqueeze(-1) * out_TD.unsqueeze(1), mix_TSS.transpose(1, 2), x_TSD)


class HyperHead(nn.Module):
    """Joins the streams behind the last layer: their sum by weights that depend on the token."""

    def __init__(
        self, spec: HyperConnectionSpec, model: DecoderSpec, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.eps, self.norm_eps = spec.eps, model.norm_eps
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.fn = nn.Parameter(torch.empty(spec.streams, spec.streams * model.hidden_size, **factory))
        self.base = nn.Parameter(torch.empty(spec.streams, **factory))
        self.scale = nn.Parameter(torch.empty(1, **factory))

    def forward(self, x_TSD: Tensor) -> Tensor:
        wide = torch.promote_types(x_TSD.dtype, torch.float32)
        flat_TX = x_TSD.flatten(1).to(wide)
        logits_TS = F.linear(F.rms_norm(flat_TX, flat_TX.shape[-1:], None, self.norm_eps), self.fn.to(wide))
        weights_TS = (logits_TS * self.scale.to(wide) + self.base.to(wide)).sigmoid() + self.eps
        return (weights_TS.unsqueeze(-1) * x_TSD).sum(1).to(x_TSD.dtype)


class _MixingWeights(torch.autograd.Function):
    """Weights to read and to write, and matrices; saves its inputs and recomputes the iterations in backward."""

    @staticmethod
    def forward(
        ctx: Any, x_TSD: Tensor, fn: Tensor, base_W: Tensor, scale_3: Tensor, spec: HyperConnectionSpec, eps: float
    ) -> Tensor:
        ctx.save_for_backward(x_TSD, fn, base_W, scale_3)
        ctx.spec, ctx.eps = spec, eps
        return _compute_weights(x_TSD, fn, base_W, scale_3, spec, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TW: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            x_TSD, fn, base_W, scale_3 = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            inputs = (x_TSD, fn, base_W, scale_3)
            weights_TW = _compute_weights(x_TSD, fn, base_W, scale_3, ctx.spec, ctx.eps)
        return (*torch.autograd.grad(weights_TW, inputs, grad_TW), None, None)


def _compute_weights(
    x_TSD: Tensor, fn: Tensor, base_W: Tensor, scale_3: Tensor, spec: HyperConnectionSpec, norm_eps: float
) -> Tensor:
    """Return all weights of each token, in float32 at least."""
    wide = torch.promote_types(x_TSD.dtype, torch.float32)
    count, eps = spec.streams, spec.eps
    flat_TX = x_TSD.flatten(1).to(wide)
    logits_TW = F.linear(F.rms_norm(flat_TX, flat_TX.shape[-1:], None, norm_eps), fn.to(wide))
    sizes = (count, count, count * count)
    scale_W = torch.cat([scale.expand(size) for scale, size in zip(scale_3.to(wide).split(1), sizes, strict=True)])
    logits_TW = logits_TW * scale_W + base_W.to(wide)
    read_TS, write_TS, mix_TSS = logits_TW.split(sizes, -1)
    mix_TSS = mix_TSS.unflatten(-1, (count, count)).softmax(-1) + eps
    mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    for _ in range(spec.iterations - 1):
        mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
    return torch.cat((read_TS.sigmoid() + eps, 2 * write_TS.sigmoid(), mix_TSS.flatten(1)), -1)
