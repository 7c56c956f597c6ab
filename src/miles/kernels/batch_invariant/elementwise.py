"""Batch-invariant elementwise functions and row reductions.

On a CPU torch computes the last elements of a range, or of one thread's part of it, with other instructions than the
rest. Sums, products, quotients and roots round the same either way; exponentials and sums along a row need care.

Shapes: D features of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements that one thread computes in whole vectors: fewer than torch's grain size, and a multiple of two SIMD vectors.
_CHUNK = 8192
_LANES = 64


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of every element, in the input's dtype."""
    denominator = map_elements(torch.exp, -x) + 1
    return torch.ones_like(denominator) / denominator


def map_elements(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of every element, independent of its position.

    It must be one that SIMD vectors compute lane by lane, like the exponential; torch's gelu, for one, is not.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    padding = -len(flat) % _LANES
    if padding:
        flat = F.pad(flat, (0, padding))
    parts = [function(part) for part in flat.split(_CHUNK)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[: x.numel()].view(x.shape)


def tree_sum(x_D: Tensor) -> Tensor:
    """The sum over the last dimension, which is kept: halves are added until one element is left."""
    size = x_D.shape[-1]
    while size > 1:
        half = (size + 1) // 2
        low_D = x_D[..., :half].clone()
        low_D[..., : size - half] += x_D[..., half:size]
        x_D, size = low_D, half
    return x_D


def softmax(x_D: Tensor) -> Tensor:
    """The softmax over the last dimension, in the input's dtype."""
    exp_D = map_elements(torch.exp, x_D - x_D.amax(-1, keepdim=True))
    return exp_D / tree_sum(exp_D)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors, added one after the other."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def weighted_sum(weights_XN: Tensor, x_XND: Tensor) -> Tensor:
    """The sum over N of rows times their weights, [X, D], one product and one sum at a time."""
    return sum_in_order([w_X1 * x_XD for w_X1, x_XD in zip(weights_XN.split(1, -1), x_XND.unbind(-2), strict=True)])


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: float32, or wider if the input is."""
    return torch.promote_types(dtype, torch.float32)


def sum_in_rank_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of several ranks' tensors, added in rank order and rounded once."""
    total = parts[0].to(accumulation_dtype(parts[0].dtype)) if parts[0].is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
