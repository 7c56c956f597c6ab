"""Vision transformer blocks: bidirectional attention with two-dimensional RoPE, and an MLP, with pre-norms.

Shapes: P patches of all images of a forward, D hidden, H heads, d head_dim, I intermediate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.attention.bidirectional import Segments, bidirectional_attention
from miles.kernels.fused.gemv import can_fuse_gelu, gelu_tanh_linear, linear
from miles.kernels.fused.vision_rope import can_rotate_fused, rotate_queries_keys
from miles.kernels.numerics import Numerics
from miles.models.layers.linear import Linear
from miles.models.layers.norm import LayerNorm, RMSNorm, unit_rms_norm
from miles.models.layers.rope import apply_rotary
from miles.models.vision.spec import CLIP_BOUNDS, VisionActivation, VisionMlpSpec, VisionNorm, VisionTowerSpec

_QUICK_GELU = 1.702


def activate(x: Tensor, kind: VisionActivation) -> Tensor:
    """The activation of every element."""
    match kind:
        case "silu":
            return F.silu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "gelu":
            return F.gelu(x)
        case "quick_gelu":
            return x * torch.sigmoid(_QUICK_GELU * x)


def build_norm(kind: VisionNorm, size: int, eps: float, **factory: Any) -> LayerNorm | RMSNorm:
    """Build a norm of ``size`` channels."""
    return LayerNorm(size, eps, **factory) if kind == "layer" else RMSNorm(size, eps, **factory)


class ProjectionClip(nn.Module):
    """The ranges that the input and the output of a projection are clamped to; they are not trained."""

    def __init__(self, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics) -> None:
        super().__init__()
        for name in CLIP_BOUNDS:
            self.register_parameter(name, nn.Parameter(torch.empty(1, device=device, dtype=dtype), requires_grad=False))

    def clamp_input(self, x: Tensor) -> Tensor:
        return x.clamp(self.get_parameter("input_min"), self.get_parameter("input_max"))

    def clamp_output(self, x: Tensor) -> Tensor:
        return x.clamp(self.get_parameter("output_min"), self.get_parameter("output_max"))


def build_clip_ranges(names: Sequence[str], present: bool, **factory: Any) -> nn.ModuleDict | None:
    """Build the ranges of projections, by name; None if they are not clipped."""
    return nn.ModuleDict({name: ProjectionClip(**factory) for name in names}) if present else None


def apply_clipped(layer: Linear, x_PD: Tensor, clips: nn.ModuleDict | None, *names: str) -> Tensor:
    """A layer that is the projections ``names``, one after the other, each with its own range."""
    if clips is None:
        return layer(x_PD)
    weight, size = layer.operand(), layer.out_features // len(names)
    outputs: list[Tensor] = []
    for number, name in enumerate(names):
        clip, rows = clips[name], slice(number * size, (number + 1) * size)
        assert isinstance(clip, ProjectionClip)
        clipped_PD = clip.clamp_input(x_PD)
        if isinstance(weight, Tensor) and not layer.has_adapter:
            bias = None if layer.bias is None else layer.bias[rows]
            out = linear(clipped_PD, weight[rows], bias, numerics=layer.numerics)
        else:
            out = layer(clipped_PD)[:, rows]
        outputs.append(clip.clamp_output(out))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


class VisionAttention(nn.Module):
    """Multi-head attention within segments."""

    def __init__(self, spec: VisionTowerSpec, **factory: Any) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.halves = spec.rope == "halves"
        self.interleaved = spec.rope in ("complex", "pairs")
        self.numerics: Numerics = factory["numerics"]
        self.qkv = Linear(spec.hidden_size, 3 * spec.hidden_size, bias=spec.qkv_bias, **factory)
        self.output = Linear(spec.hidden_size, spec.hidden_size, bias=spec.output_bias, **factory)
        self.clips = build_clip_ranges(("q", "k", "v", "o"), spec.clipped, **factory)
        self.scale = 1.0 if spec.qk_norm else spec.head_dim**-0.5
        self.eps = spec.norm_eps
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.norms_values = spec.qk_norm
        if spec.qk_norm or spec.scaled_qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(spec.head_dim, spec.norm_eps, **factory) for _ in range(2))

    def forward(self, x_PD: Tensor, cos_sin_P2d: Tensor | None, segments: Segments) -> Tensor:
        q_PHd, k_PHd, v_PHd = self.project(x_PD, cos_sin_P2d)
        out_PHd = bidirectional_attention(q_PHd, k_PHd, v_PHd, segments, self.scale, numerics=self.numerics)
        return apply_clipped(self.output, out_PHd.flatten(1), self.clips, "o")

    def project(self, x_PD: Tensor, cos_sin_P2d: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [P, H, d] each, with QK-norm and RoPE where there are any."""
        qkv = apply_clipped(self.qkv, x_PD, self.clips, "q", "k", "v")
        return self.norm_and_rotate(qkv.unflatten(-1, (3, -1, self.head_dim)), cos_sin_P2d)

    def norm_and_rotate(self, qkv_P3Hd: Tensor, cos_sin_P2d: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of a projection, with QK-norm and RoPE where there are any."""
        q_PHd, k_PHd, v_PHd = qkv_P3Hd.unbind(1)
        if self.q_norm is not None and self.k_norm is not None:
            q_PHd, k_PHd = self.q_norm(q_PHd), self.k_norm(k_PHd)
            v_PHd = unit_rms_norm(v_PHd, self.eps, self.numerics) if self.norms_values else v_PHd
        elif cos_sin_P2d is not None and not self.numerics.batch_invariant and can_rotate_fused(qkv_P3Hd):
            options = {"interleaved": self.interleaved, "halves": self.halves}
            return *rotate_queries_keys(qkv_P3Hd, cos_sin_P2d, **options), v_PHd
        if cos_sin_P2d is not None:
            q_PHd, k_PHd = (self._rotate(x_PHd, cos_sin_P2d) for x_PHd in (q_PHd, k_PHd))
        return q_PHd, k_PHd, v_PHd

    def _rotate(self, x_PHd: Tensor, cos_sin_P2d: Tensor) -> Tensor:
        wide_PHd = x_PHd.to(cos_sin_P2d.dtype)
        if self.halves:
            # The pairs of both halves as those of one: the order of channels is the same in queries and keys.
            wide_PHd = wide_PHd.unflatten(-1, (2, 2, -1)).transpose(-3, -2).flatten(-3)
        rotated_PHd = apply_rotary(wide_PHd, cos_sin_P2d, interleaved=self.interleaved, numerics=self.numerics)
        return rotated_PHd.to(x_PHd.dtype)


class VisionMlp(nn.Module):
    """Up projection, activation, down projection; if gated, gate and up are one projection."""

    def __init__(self, width: int, spec: VisionMlpSpec, *, clipped: bool = False, **factory: Any) -> None:
        super().__init__()
        assert spec.gated or not clipped, "only gated MLPs are clipped"
        self.clips = build_clip_ranges(("gate", "up", "down"), clipped, **factory)
        self.activation: VisionActivation = spec.activation
        self.gate_up: Linear | None = None
        self.up: Linear | None = None
        if spec.gated:
            self.gate_up = Linear(width, 2 * spec.size, bias=spec.bias, **factory)
        else:
            self.up = Linear(width, spec.size, bias=spec.bias, **factory)
        self.down = Linear(spec.size, width, bias=spec.bias, **factory)

    def forward(self, x_PD: Tensor) -> Tensor:
        if self.gate_up is not None:
            gate_PI, up_PI = apply_clipped(self.gate_up, x_PD, self.clips, "gate", "up").chunk(2, dim=-1)
            return apply_clipped(self.down, activate(gate_PI, self.activation) * up_PI, self.clips, "down")
        return self.down(self.expand(x_PD))

    def expand(self, x_PD: Tensor) -> Tensor:
        """The up projection and the activation of an MLP that is not gated, [P, I]."""
        assert self.up is not None
        if self.activation == "gelu_tanh" and can_fuse_gelu(x_PD, self.up.bias, numerics=self.up.numerics):
            weight = self.up.operand()
            if isinstance(weight, Tensor) and not self.up.has_adapter:
                return gelu_tanh_linear(x_PD, weight, self.up.bias)
        return activate(self.up(x_PD), self.activation)


class VisionBlock(nn.Module):
    """Attention and an MLP, each with a pre-norm and a residual connection."""

    def __init__(self, spec: VisionTowerSpec, **factory: Any) -> None:
        super().__init__()
        self.attention_norm = build_norm(spec.norm, spec.hidden_size, spec.norm_eps, **factory)
        self.attention = VisionAttention(spec, **factory)
        self.mlp_norm = build_norm(spec.norm, spec.hidden_size, spec.norm_eps, **factory)
        self.mlp = VisionMlp(spec.hidden_size, spec.mlp, clipped=spec.clipped, **factory)
        self.attention_post_norm: LayerNorm | RMSNorm | None = None
        self.mlp_post_norm: LayerNorm | RMSNorm | None = None
        if spec.block_post_norms:
            norms = (build_norm(spec.norm, spec.hidden_size, spec.norm_eps, **factory) for _ in range(2))
            self.attention_post_norm, self.mlp_post_norm = norms
        self.attention_scale: nn.Parameter | None = None
        self.mlp_scale: nn.Parameter | None = None
        if spec.layer_scale:
            device, dtype = factory["device"], factory["dtype"]
            self.attention_scale = nn.Parameter(torch.empty(spec.hidden_size, device=device, dtype=dtype))
            self.mlp_scale = nn.Parameter(torch.empty(spec.hidden_size, device=device, dtype=dtype))

    def forward(self, x_PD: Tensor, cos_sin_P2d: Tensor | None, segments: Segments) -> Tensor:
        y_PD = self.attention(self.attention_norm(x_PD), cos_sin_P2d, segments)
        y_PD = y_PD if self.attention_post_norm is None else self.attention_post_norm(y_PD)
        y_PD = y_PD if self.attention_scale is None else y_PD * self.attention_scale
        x_PD, normed_PD = self.mlp_norm.add_norm(y_PD, x_PD)
        y_PD = self.mlp(normed_PD)
        y_PD = y_PD if self.mlp_post_norm is None else self.mlp_post_norm(y_PD)
        return x_PD + (y_PD if self.mlp_scale is None else y_PD * self.mlp_scale)
