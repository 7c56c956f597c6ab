"""Projectors: from the patches of a square to one feature of the decoder's width.

Shapes: F features, S = merge_size^2 patches of a square, D hidden of the tower, W hidden of the decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.fused.gemv import linear
from miles.models.layers.linear import Linear
from miles.models.layers.norm import LayerNorm, RMSNorm, unit_rms_norm
from miles.models.vision.encoder import VisionMlp, activate, build_norm
from miles.models.vision.spec import (
    ConvMergerSpec,
    MergerSpec,
    MlpProjectorSpec,
    PoolProjectorSpec,
    ProjectorSpec,
    ScaledPoolProjectorSpec,
    ShuffleProjectorSpec,
    VisionActivation,
    VisionMlpSpec,
)


def build_projector(spec: ProjectorSpec, hidden: int, merge_size: int, width: int, **factory: Any) -> nn.Module:
    """Build the module of a projector, which maps [F, S, D] to [F, W]."""
    match spec:
        case MergerSpec():
            return PatchMerger(spec, hidden, merge_size, width, **factory)
        case ConvMergerSpec():
            return ConvMerger(spec, hidden, merge_size, width, **factory)
        case MlpProjectorSpec():
            return MlpProjector(spec, hidden, merge_size, width, **factory)
        case ShuffleProjectorSpec():
            return ShuffleProjector(spec, hidden, merge_size, width, **factory)
        case PoolProjectorSpec():
            return PoolProjector(spec, hidden, width, **factory)
        case ScaledPoolProjectorSpec():
            return ScaledPoolProjector(spec, hidden, width, **factory)


class PatchMerger(nn.Module):
    """``MergerSpec``."""

    def __init__(self, spec: MergerSpec, hidden: int, merge_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.norm_merged = spec.norm_merged
        merged = hidden * merge_size**2
        self.norm = build_norm(spec.norm, merged if spec.norm_merged else hidden, spec.norm_eps, **factory)
        self.up = Linear(merged, merged, bias=True, **factory)
        self.down = Linear(merged, width, bias=True, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        x = self.norm(x_FSD.flatten(1)) if self.norm_merged else self.norm(x_FSD).flatten(1)
        return self.down(activate(self.up(x), "gelu"))


class ConvMerger(nn.Module):
    """``ConvMergerSpec``; the convolution covers each square once, so it is a matmul."""

    def __init__(self, spec: ConvMergerSpec, hidden: int, merge_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        device, dtype = factory["device"], factory["dtype"]
        self.numerics = factory["numerics"]
        shape = (width, hidden, merge_size, merge_size)
        self.downsample = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.downsample_bias = nn.Parameter(torch.empty(width, device=device, dtype=dtype))
        self.input = Linear(width, width, bias=False, **factory)
        self.norm = LayerNorm(width, spec.norm_eps, **factory)
        mlp = VisionMlpSpec(size=spec.size, activation=spec.activation, gated=True, bias=False)
        self.mlp = VisionMlp(width, mlp, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        weight = self.downsample.permute(0, 2, 3, 1).flatten(1)
        x_FW = linear(x_FSD.flatten(1), weight, self.downsample_bias, numerics=self.numerics)
        return self.mlp(activate(self.norm(self.input(x_FW)), "gelu"))


class MlpProjector(nn.Module):
    """``MlpProjectorSpec``."""

    def __init__(self, spec: MlpProjectorSpec, hidden: int, merge_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.activation: VisionActivation = spec.activation
        self.norm = None if spec.norm_eps is None else RMSNorm(hidden, spec.norm_eps, **factory)
        self.merge: Linear | None = None
        if merge_size > 1:
            self.merge = Linear(hidden * merge_size**2, hidden, bias=False, **factory)
        self.up = Linear(hidden, width, bias=spec.bias, **factory)
        self.down = Linear(width, width, bias=spec.bias, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        x_FSD = x_FSD if self.norm is None else self.norm(x_FSD)
        # The merging weight has the patches of a square channel by channel.
        x_FD = x_FSD.flatten(1) if self.merge is None else self.merge(x_FSD.transpose(1, 2).flatten(1))
        return self.down(activate(self.up(x_FD), self.activation))


class ShuffleProjector(nn.Module):
    """``ShuffleProjectorSpec``."""

    def __init__(self, spec: ShuffleProjectorSpec, hidden: int, merge_size: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.kind = spec.kind
        self.merge_size = merge_size
        self.by_column = spec.by_column
        merged = hidden * merge_size**2
        self.norm: LayerNorm | None = None
        self.up: Linear | None = None
        self.down: Linear | None = None
        match spec.kind:
            case "linear":
                self.output = Linear(merged, width, bias=False, **factory)
            case "mlp":
                self.norm = LayerNorm(merged, spec.norm_eps, **factory)
                self.up = Linear(merged, width, bias=True, **factory)
                self.output = Linear(width, width, bias=True, **factory)
            case "adapter":
                self.up = Linear(merged, spec.inner, bias=False, **factory)
                self.down = Linear(spec.inner, spec.outer, bias=False, **factory)
                self.output = Linear(spec.outer, width, bias=False, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        if self.by_column:
            x_FSD = x_FSD.unflatten(1, (self.merge_size, self.merge_size)).transpose(1, 2).flatten(1, 2)
        x = x_FSD.flatten(1)
        if self.norm is not None:
            x = self.norm(x)
        if self.up is not None:
            x = activate(self.up(x), "gelu")
        if self.down is not None:
            x = activate(self.down(x), "gelu")
        return self.output(x)


class PoolProjector(nn.Module):
    """``PoolProjectorSpec``."""

    def __init__(self, spec: PoolProjectorSpec, hidden: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.norm = RMSNorm(hidden, spec.norm_eps, offset=spec.norm_offset, **factory)
        self.output = Linear(hidden, width, bias=False, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        return self.output(self.norm(x_FSD.mean(1)))


class ScaledPoolProjector(nn.Module):
    """``ScaledPoolProjectorSpec``; pooled and standardized in float32, where the scaled values do not overflow."""

    def __init__(self, spec: ScaledPoolProjectorSpec, hidden: int, width: int, **factory: Any) -> None:
        super().__init__()
        self.eps = spec.norm_eps
        self.numerics = factory["numerics"]
        self.std_bias: nn.Parameter | None = None
        self.std_scale: nn.Parameter | None = None
        if spec.standardize:
            device, dtype = factory["device"], factory["dtype"]
            self.std_bias = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype), requires_grad=False)
            self.std_scale = nn.Parameter(torch.empty(hidden, device=device, dtype=dtype), requires_grad=False)
        self.output = Linear(hidden, width, bias=False, **factory)

    def forward(self, x_FSD: Tensor) -> Tensor:
        wide = torch.promote_types(x_FSD.dtype, torch.float32)
        # The mean of a square is rounded to the tower's dtype, as the models were trained.
        x_FD = x_FSD.to(wide).mean(1).to(x_FSD.dtype).to(wide) * x_FSD.shape[-1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            x_FD = (x_FD - self.std_bias.to(wide)) * self.std_scale.to(wide)
        return self.output(unit_rms_norm(x_FD.to(x_FSD.dtype), self.eps, self.numerics))
