"""What elements and rows are made of where a result may depend on nothing beside them.

On a CPU torch computes the last elements of a range, or of one thread's part of it, with other instructions than the
rest. Sums, products, quotients and roots of two numbers come out alike; exponentials and sums along a row need care.

Shapes: D features of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

# Elements that one thread computes in whole vectors: fewer than torch shares out, and a multiple of two vectors' lanes.
_PIECE = 8192
_LANES = 64


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of every element, in the dtype that is given."""
    below = each(torch.exp, -x) + 1
    return torch.ones_like(below) / below


def each(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of every element, the same wherever it stands.

    It must be one that vectors compute lane by lane, as the exponential is; torch's gelu, for one, is not.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    missing = -len(flat) % _LANES
    if missing:
        flat = F.pad(flat, (0, missing))
    parts = [function(part) for part in flat.split(_PIECE)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[: x.numel()].view(x.shape)


def summed(x_D: Tensor) -> Tensor:
    """The sum over the last dimension, which stays: halves onto each other, until one is left."""
    size = x_D.shape[-1]
    while size > 1:
        half = (size + 1) // 2
        low_D = x_D[..., :half].clone()
        low_D[..., : size - half] += x_D[..., half:size]
        x_D, size = low_D, half
    return x_D


def softmax(x_D: Tensor) -> Tensor:
    """Shares of the last dimension, in the dtype that is given."""
    power_D = each(torch.exp, x_D - x_D.amax(-1, keepdim=True))
    return power_D / summed(power_D)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """What is reckoned in: float32, or wider where the numbers are."""
    return torch.promote_types(dtype, torch.float32)


def in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of what several ranks have, added in the order of the ranks and rounded once."""
    total = parts[0].to(wide_of(parts[0].dtype)) if parts[0].is_floating_point() else parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)
