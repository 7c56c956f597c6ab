"""Rotary positions: angles in float32, one table per (spec, device), applied to queries and keys in three operations.

Shapes: P positions, T tokens, N heads, d head_dim, h = d/2.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from miles.kernels.arithmetic import exact
from miles.kernels.exact import heads
from miles.models.spec import RopeSpec

# Above this many positions a table costs more memory than recomputing angles costs time.
_LONGEST_TABLE = 1 << 17
# Positions whose angles are turned into numbers at once: the same in every process, however many threads it has.
_PIECE = 64


def frequencies(rope: RopeSpec, dim: int, max_positions: int) -> Tensor:
    """The angle per position of each pair of ``dim`` channels, float32 [h], on the CPU.

    They are the same for every token of a run, since keys already rotated and remembered cannot be turned again when
    their sequence grows. So ``longrope`` takes its long factors where ``max_positions`` goes beyond the original
    length, however short a sequence is; and ``dynamic``, which stretches only what lies beyond the longest sequence
    there can be, is ``default`` here.
    """
    period_h = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    match rope.kind:
        case "default" | "dynamic":
            return 1.0 / period_h
        case "linear":
            return 1.0 / period_h / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / period_h)
        case "yarn":
            return _yarn(rope, dim, period_h)
        case "longrope":
            long = max_positions > rope.original_max_positions
            factors = rope.long_factors if long else rope.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * period_h)


def _llama3(rope: RopeSpec, inv_h: Tensor) -> Tensor:
    """Slow channels are stretched, fast ones are not, and between the two wavelengths one turns into the other."""
    low_wavelength = rope.original_max_positions / rope.low_freq_factor
    high_wavelength = rope.original_max_positions / rope.high_freq_factor
    wavelength_h = 2 * math.pi / inv_h
    stretched_h = torch.where(wavelength_h > low_wavelength, inv_h / rope.factor, inv_h)
    span = rope.high_freq_factor - rope.low_freq_factor
    smooth_h = (rope.original_max_positions / wavelength_h - rope.low_freq_factor) / span
    blended_h = (1 - smooth_h) * stretched_h / rope.factor + smooth_h * stretched_h
    between_h = (wavelength_h >= high_wavelength) & (wavelength_h <= low_wavelength)
    return torch.where(between_h, blended_h, stretched_h)


def _yarn(rope: RopeSpec, dim: int, period_h: Tensor) -> Tensor:
    """Channels that turn often within the original length stay, those that turn seldom are stretched."""

    def channel(turns: float) -> float:
        """Which channel pair turns that often within the original length."""
        return dim * math.log(rope.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # a step rather than a division by zero
    place_h = torch.arange(len(period_h), dtype=torch.float32, device="cpu")
    kept_h = 1 - ((place_h - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * period_h) * (1 - kept_h) + 1.0 / period_h * kept_h


def _rotation(angle_Ph: Tensor, rope: RopeSpec) -> Tensor:
    """Cosines and sines laid side by side, [P, 2, d].

    Swapping a vector's halves (or its neighbours) and negating the first is the rotation's other leg; the minus sign
    is kept in the table so that the swap alone is left to do.
    """
    pieces = angle_Ph.split(_PIECE) if angle_Ph.device.type == "cpu" and len(angle_Ph) > _PIECE else (angle_Ph,)
    cos_Ph, sin_Ph = (torch.cat([f(piece) for piece in pieces]) * rope.scale for f in (torch.cos, torch.sin))
    if rope.interleaved:
        return torch.stack((cos_Ph.repeat_interleave(2, -1), torch.stack((-sin_Ph, sin_Ph), -1).flatten(-2)), dim=1)
    return torch.stack((torch.cat((cos_Ph, cos_Ph), -1), torch.cat((-sin_Ph, sin_Ph), -1)), dim=1)


@lru_cache(maxsize=16)
def _table(rope: RopeSpec, dim: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Made outside inference mode whoever asks first, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        inv_h = frequencies(rope, dim, length)
        return _rotation(torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inv_h), rope).to(
            device=device, dtype=dtype
        )


@lru_cache(maxsize=16)
def _frequencies_on(rope: RopeSpec, dim: int, length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return frequencies(rope, dim, length).to(device)


@lru_cache(maxsize=16)
def _logs(most: int, device: torch.device) -> Tensor:
    """log(1 + n) of the numbers up to ``most``, in pieces as the angles are."""
    with torch.inference_mode(False), torch.no_grad():
        numbers = torch.arange(most + 1, dtype=torch.float32, device="cpu")
        return torch.cat([torch.log1p(piece) for piece in numbers.split(1 << 14)]).to(device)


class Positions:
    """Where the tokens of one forward stand in their sequences, and what follows from that, each computed once.

    The first use of a kind of rotation on a device makes its table, so run a forward before capturing one in a graph.
    """

    def __init__(self, positions_T: Tensor, max_positions: int, dtype: torch.dtype) -> None:
        self.positions_T = positions_T
        self._max = max_positions
        self._dtype = dtype
        self._rotations: dict[tuple[RopeSpec, int], Tensor] = {}
        self._temperatures: dict[tuple[float, float, float], Tensor] = {}

    def rotation(self, rope: RopeSpec, head_dim: int) -> Tensor:
        """What ``rotate`` needs, [T, 2, rope.dim or head_dim]."""
        key = (rope, rope.dim or head_dim)
        if key not in self._rotations:
            self._rotations[key] = rotation(*key, self._max, self.positions_T, self._dtype)
        return self._rotations[key]

    def table(self, rope: RopeSpec, head_dim: int) -> Tensor | None:
        """The rotations of all positions, [P, 2, rope.dim or head_dim]; None where they are too many to keep."""
        if not _has_table(self._max, self.positions_T.device):
            return None
        return _table(rope, rope.dim or head_dim, self._max, self.positions_T.device, self._dtype)

    def temperature(self, floor: float, slope: float, ahead: float = 1.0) -> Tensor:
        """What queries are multiplied by where they grow sharper every ``floor`` positions, float32 [T, 1, 1].

        The step comes ``ahead`` positions before a multiple of ``floor``.
        """
        key = (floor, slope, ahead)
        if key not in self._temperatures:
            steps_T = torch.floor((self.positions_T.to(torch.float32) + ahead) / floor)
            logs_T = torch.log1p(steps_T)
            if exact():  # looked up, as a rotation is
                most = int((self._max + ahead) // floor) + 1
                logs_T = _logs(most, steps_T.device).index_select(0, steps_T.long())
            self._temperatures[key] = (logs_T * slope + 1.0)[:, None, None]
        return self._temperatures[key]


def _has_table(max_positions: int, device: torch.device) -> bool:
    """Whether positions are looked up. A CPU's cosine of an angle may depend on the angles beside it."""
    return max_positions <= _LONGEST_TABLE or (device.type == "cpu" and exact())


def rotation(rope: RopeSpec, dim: int, max_positions: int, positions_T: Tensor, dtype: torch.dtype) -> Tensor:
    """What ``rotate`` needs for these positions, [T, 2, dim] in ``dtype``."""
    if _has_table(max_positions, positions_T.device):
        return _table(rope, dim, max_positions, positions_T.device, dtype).index_select(0, positions_T)
    freq_h = _frequencies_on(rope, dim, max_positions, positions_T.device)
    return _rotation(torch.outer(positions_T.to(torch.float32), freq_h), rope).to(dtype)


def rotate(x_TNd: Tensor, rotation_T2d: Tensor, *, interleaved: bool = False) -> Tensor:
    """Turn each head's channel pairs by their position's angles; channels beyond the rotation's stay as they are."""
    if exact():
        return heads.rotate(x_TNd, rotation_T2d, interleaved=interleaved)
    dim = rotation_T2d.shape[-1]
    if dim < x_TNd.shape[-1]:
        turned_TNd, rest_TNd = x_TNd.split((dim, x_TNd.shape[-1] - dim), dim=-1)
        return torch.cat((rotate(turned_TNd, rotation_T2d, interleaved=interleaved), rest_TNd), -1)
    cos_T1d, sin_T1d = rotation_T2d.split(1, dim=1)
    swapped_TNd = x_TNd.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNd.roll(dim // 2, -1)
    return torch.addcmul(x_TNd * cos_T1d, swapped_TNd, sin_T1d)
