"""Activations and norms of recurrent layers (Gated DeltaNet, KDA, Mamba-2), in the numerics of the model.

Shapes: T tokens, G heads, k channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant import activation, rms_norm
from miles.kernels.numerics import Numerics

__all__ = ["normalize_heads", "sigmoid", "silu", "softplus", "wide_rms_norm"]

# Avoids division by zero for all-zero keys; part of the architecture.
_UNIT_EPS = 1e-6


def silu(x: Tensor, numerics: Numerics) -> Tensor:
    """x * sigmoid(x)."""
    return activation.ungated_activation(x, "silu") if numerics.batch_invariant else F.silu(x)


def sigmoid(x: Tensor, numerics: Numerics) -> Tensor:
    """1 / (1 + exp(-x))."""
    return activation.sigmoid(x) if numerics.batch_invariant else x.sigmoid()


def softplus(x: Tensor, numerics: Numerics) -> Tensor:
    """log(1 + exp(x))."""
    return activation.softplus(x) if numerics.batch_invariant else F.softplus(x)


def normalize_heads(x_TGk: Tensor, numerics: Numerics) -> Tensor:
    """L2-normalize each head's vector, in float32."""
    x_TGk = x_TGk.to(torch.promote_types(x_TGk.dtype, torch.float32))
    if numerics.batch_invariant:
        # The mean square is the square sum over the channels, so eps and the result are scaled.
        channels = x_TGk.shape[-1]
        return rms_norm.rms_norm(x_TGk, None, _UNIT_EPS / channels) * channels**-0.5
    return x_TGk * torch.rsqrt(x_TGk.square().sum(-1, keepdim=True) + _UNIT_EPS)


def wide_rms_norm(x: Tensor, weight: Tensor | None, eps: float, numerics: Numerics) -> Tensor:
    """RMSNorm over the last dimension, in float32, which the result keeps."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    weight = None if weight is None else weight.to(x.dtype)
    if numerics.batch_invariant:
        return rms_norm.rms_norm(x, weight, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)
