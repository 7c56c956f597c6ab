"""Rotary positions: angles in float32, one table per (spec, device), applied to queries and keys in three operations.

Shapes: P positions, T tokens, N heads, d head_dim, h = d/2.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from miles.models.spec import RopeSpec

# Above this many positions a table costs more memory than recomputing angles costs time.
_LONGEST_TABLE = 1 << 17


def frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """The angle per position of each pair of channels, float32 [h], on the CPU."""
    inv_h = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim))
    if rope.kind == "default":
        return inv_h
    if rope.kind == "linear":
        return inv_h / rope.factor
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelength_h = 2 * math.pi / inv_h
    stretched_h = torch.where(wavelength_h > low_wavelength, inv_h / rope.factor, inv_h)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth_h = (rope.original_max_positions / wavelength_h - rope.low_freq_factor) / span
    blended_h = (1 - smooth_h) * stretched_h / rope.factor + smooth_h * stretched_h
    between_h = (wavelength_h >= high_wavelength) & (wavelength_h <= low_wavelength)
    return torch.where(between_h, blended_h, stretched_h)


def _rotation(angle_Ph: Tensor) -> Tensor:
    """Cosines and sines laid side by side, [P, 2, d].

    Swapping a vector's halves and negating the first is the rotation's other leg; the minus sign is
    kept in the table so that the swap alone (a roll) is left to do.
    """
    cos_Ph, sin_Ph = angle_Ph.cos(), angle_Ph.sin()
    return torch.stack((torch.cat((cos_Ph, cos_Ph), -1), torch.cat((-sin_Ph, sin_Ph), -1)), dim=1)


@lru_cache(maxsize=16)
def _table(rope: RopeSpec, head_dim: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Made outside inference mode whoever asks first, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        angle_Ph = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), frequencies(rope, head_dim))
        return _rotation(angle_Ph).to(device=device, dtype=dtype)


@lru_cache(maxsize=16)
def _frequencies_on(rope: RopeSpec, head_dim: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return frequencies(rope, head_dim).to(device)


def rotation(rope: RopeSpec, head_dim: int, max_positions: int, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``rotate`` needs for these positions, [T, 2, d] in ``dtype``; once per forward, for all layers.

    The first call for a device makes its table, so run a forward once before capturing one in a graph.
    """
    if max_positions <= _LONGEST_TABLE:
        return _table(rope, head_dim, max_positions, positions_T.device, dtype).index_select(0, positions_T)
    freq_h = _frequencies_on(rope, head_dim, positions_T.device)
    return _rotation(torch.outer(positions_T.to(torch.float32), freq_h)).to(dtype)


def rotate(x_TNd: Tensor, rotation_T2d: Tensor) -> Tensor:
    """Turn each head's channel pairs by their position's angles."""
    cos_T1d, sin_T1d = rotation_T2d.split(1, dim=1)
    return torch.addcmul(x_TNd * cos_T1d, x_TNd.roll(x_TNd.shape[-1] // 2, -1), sin_T1d)
