"""AltUp (alternating updates) and LAuReL: several residual streams, and a learned residual connection of low rank.

Shapes: T tokens, D hidden, N residual streams, R rank of the learned residual.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant.elementwise import map_elements, sum_in_order, tree_sum, weighted_sum
from miles.kernels.numerics import Numerics
from miles.models.layers.linear import Linear
from miles.models.layers.norm import RMSNorm
from miles.models.residual_spec import AltUpSpec

# Fixed by the architecture: the least mean square that a stream is scaled from.
_MIN_MEAN_SQUARE = 1e-5


class AltUpStreams(nn.Module):
    """The streams of the first layer, from the embedding, and their mean behind the last layer.

    Every other stream is projected from, or to, the first one, and scaled to its mean square.
    """

    def __init__(
        self, spec: AltUpSpec, width: int, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"bias": False, "device": device, "dtype": dtype, "numerics": numerics}
        others = range(1, spec.streams)
        self.numerics = numerics
        self.projections = nn.ModuleList(Linear(width, width, **factory) for _ in others)
        self.unembed_projections = nn.ModuleList(Linear(width, width, **factory) for _ in others)

    def split(self, x_TD: Tensor) -> Tensor:
        """Return the streams of embeddings, [T, N, D]."""
        others = (_scale_like(projection(x_TD), x_TD, self.numerics) for projection in self.projections)
        return torch.stack((x_TD, *others), 1)

    def join(self, x_TND: Tensor) -> Tensor:
        """Return the mean of the streams, [T, D]."""
        first_TD, *rest = x_TND.unbind(1)
        pairs = zip(self.unembed_projections, rest, strict=True)
        others = (_scale_like(projection(x_TD), first_TD, self.numerics) for projection, x_TD in pairs)
        if self.numerics.batch_invariant:
            wide = torch.promote_types(first_TD.dtype, torch.float32)
            total_TD = sum_in_order([x_TD.to(wide) for x_TD in (first_TD, *others)])
            return (total_TD / x_TND.shape[1]).to(first_TD.dtype)
        return torch.stack((first_TD, *others)).mean(0)


def _scale_like(x_TD: Tensor, like_TD: Tensor, numerics: Numerics) -> Tensor:
    """Scale a stream to the mean square of another."""
    if numerics.batch_invariant:
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        target_T1, own_T1 = (tree_sum(x.to(wide) * x.to(wide)) / x.shape[-1] for x in (like_TD, x_TD))
        scale_T1 = target_T1.sqrt() / own_T1.clamp(min=_MIN_MEAN_SQUARE).sqrt()
        return (x_TD.to(wide) * scale_T1).to(x_TD.dtype)
    target_T1 = like_TD.square().mean(-1, keepdim=True) ** 0.5
    return x_TD * target_T1 / x_TD.square().mean(-1, keepdim=True).clamp(min=_MIN_MEAN_SQUARE).sqrt()


class AltUp(nn.Module):
    """Predict the streams before a layer, correct them behind it; both by coefficients that a router computes."""

    def __init__(
        self,
        spec: AltUpSpec,
        width: int,
        *,
        eps: float,
        offset: float,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.spec, self.numerics = spec, numerics
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.prediction = Linear(spec.streams, spec.streams**2, bias=False, **factory)
        self.correction = Linear(spec.streams, spec.streams, bias=False, **factory)
        self.router = Linear(width, spec.streams, bias=False, **factory)
        self.router_norm = RMSNorm(width, eps, offset=offset, **factory)
        self.output_scale = nn.Parameter(torch.empty(width, device=device, dtype=dtype))

    def predict(self, x_TND: Tensor) -> Tensor:
        """Return the predicted streams: each is itself plus a mixture of all."""
        mixture_TNN = self._coefficients(self.prediction, x_TND[:, self.spec.active])
        mixture_TNN = mixture_TNN.unflatten(-1, (self.spec.streams, -1))
        if not self.numerics.batch_invariant:
            return torch.bmm(mixture_TNN, x_TND) + x_TND
        wide_TND = x_TND.to(torch.promote_types(x_TND.dtype, torch.float32))
        mixed = [weighted_sum(weights_TN.to(wide_TND.dtype), wide_TND) for weights_TN in mixture_TNN.unbind(1)]
        return torch.stack(mixed, 1).to(x_TND.dtype) + x_TND

    def correct(self, predicted_TND: Tensor, out_TD: Tensor) -> Tensor:
        """Return the streams, each with a part of the difference between the layer's output and its prediction."""
        change_TD = out_TD - predicted_TND[:, self.spec.active]
        part_TN = self._coefficients(self.correction, out_TD) + 1.0
        return change_TD.unsqueeze(1) * part_TN.unsqueeze(-1) + predicted_TND

    def add_to_others(self, corrected_TND: Tensor, x_TD: Tensor) -> Tensor:
        """Add to all streams but the first."""
        first_T1D, rest_TnD = corrected_TND.tensor_split((1,), dim=1)
        return torch.cat((first_T1D, rest_TnD + x_TD.unsqueeze(1)), 1)

    def scale_active(self, corrected_TND: Tensor) -> Tensor:
        """Return the active stream times the learned scale of each channel."""
        return corrected_TND[:, self.spec.active] * self.output_scale

    def _coefficients(self, layer: Linear, x_TD: Tensor) -> Tensor:
        routed_TN = self.router(self.router_norm(x_TD) * x_TD.shape[-1] ** -1.0)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        tanh = partial(map_elements, torch.tanh) if self.numerics.batch_invariant else torch.tanh
        modalities_TN = tanh(routed_TN.to(wide)).to(x_TD.dtype)
        return layer(modalities_TN)


class Laurel(nn.Module):
    """LAuReL, a learned residual: the input plus its normalized projection through ``rank`` channels."""

    def __init__(
        self,
        rank: int,
        width: int,
        *,
        eps: float,
        offset: float,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        factory: dict[str, Any] = {"device": device, "dtype": dtype, "numerics": numerics}
        self.left = Linear(width, rank, bias=False, **factory)
        self.right = Linear(rank, width, bias=False, **factory)
        self.norm = RMSNorm(width, eps, offset=offset, **factory)

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD + self.norm(self.right(self.left(x_TD)))
