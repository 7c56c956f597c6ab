"""Rotary position embedding (RoPE): inverse frequencies, cos/sin cache per (spec, device), and its application.

Shapes: P positions, T tokens, N heads, d head_dim, h = d/2. Positions [3, T] are those in time, height and width.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from miles.kernels.batch_invariant import qk_norm_rope
from miles.kernels.batch_invariant.elementwise import map_elements
from miles.kernels.numerics import Numerics
from miles.models.spec import RopeSpec

# Longer contexts compute cos/sin per forward instead of caching them for all positions. GPU engines cache more: their
# fused kernels look cos/sin up, and 2^18 positions (Qwen3-VL) of 128 channels in bfloat16 take 128 MiB.
_MAX_CACHED_POSITIONS = 1 << 17
_MAX_CACHED_POSITIONS_ON_GPU = 1 << 18
# Positions per cos/sin call: a fixed size gives the same bits with any number of threads.
_CHUNK = 64


def compute_inv_freq(rope: RopeSpec, dim: int, max_positions: int) -> Tensor:
    """Compute the inverse frequency of each pair of ``dim`` channels, float32 [h], on the CPU.

    They are the same for every token of a run, since cached keys cannot be rotated again when their sequence grows. So
    ``longrope`` uses its long factors if ``max_positions`` exceeds the original length, however short a sequence is;
    and ``dynamic``, which only rescales beyond the original length, is ``default`` here.
    """
    period_h = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
    match rope.kind:
        case "default" | "dynamic":
            return 1.0 / period_h
        case "linear":
            return 1.0 / period_h / rope.factor
        case "proportional":
            rotates_h = torch.arange(len(period_h), device="cpu") < rope.rotated_pairs
            return torch.where(rotates_h, 1.0 / period_h, 0.0) / rope.factor
        case "llama3":
            return _llama3(rope, 1.0 / period_h)
        case "yarn":
            return _yarn(rope, dim, period_h)
        case "longrope":
            long = max_positions > rope.original_max_positions
            factors = rope.long_factors if long else rope.short_factors
            return 1.0 / (torch.tensor(factors, dtype=torch.float32, device="cpu") * period_h)


def _llama3(rope: RopeSpec, inv_h: Tensor) -> Tensor:
    """Scale low frequencies, keep high ones, and interpolate between the two wavelengths."""
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
    """Keep channels that complete many rotations within the original length, scale those that complete few."""

    def channel(rotations: float) -> float:
        """The channel pair that completes so many rotations within the original length."""
        return dim * math.log(rope.original_max_positions / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001  # avoids a division by zero
    index_h = torch.arange(len(period_h), dtype=torch.float32, device="cpu")
    unscaled_h = 1 - ((index_h - first) / (last - first)).clamp(0, 1)
    return 1.0 / (rope.factor * period_h) * (1 - unscaled_h) + 1.0 / period_h * unscaled_h


def _build_cos_sin(angle_Ph: Tensor, rope: RopeSpec) -> Tensor:
    """Stack cosines and sines, [P, 2, d].

    Rotation is ``x * cos + swap(x) * sin``, where swap exchanges a vector's halves (or neighbours); the sign is in the
    sines.
    """
    chunks = angle_Ph.split(_CHUNK) if angle_Ph.device.type == "cpu" and len(angle_Ph) > _CHUNK else (angle_Ph,)
    cos_Ph, sin_Ph = (torch.cat([f(chunk) for chunk in chunks]) * rope.scale for f in (torch.cos, torch.sin))
    if rope.interleaved:
        return torch.stack((cos_Ph.repeat_interleave(2, -1), torch.stack((-sin_Ph, sin_Ph), -1).flatten(-2)), dim=1)
    return torch.stack((torch.cat((cos_Ph, cos_Ph), -1), torch.cat((-sin_Ph, sin_Ph), -1)), dim=1)


@lru_cache(maxsize=16)
def _cos_sin_cache(rope: RopeSpec, dim: int, length: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Not an inference tensor, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        inv_h = compute_inv_freq(rope, dim, length)
        return _build_cos_sin(torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inv_h), rope).to(
            device=device, dtype=dtype
        )


@lru_cache(maxsize=16)
def _inv_freq_on(rope: RopeSpec, dim: int, length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return compute_inv_freq(rope, dim, length).to(device)


@lru_cache(maxsize=16)
def _log1p_table(most: int, device: torch.device) -> Tensor:
    """log(1 + n) for n up to ``most``, computed in fixed chunks like the angles."""
    with torch.inference_mode(False), torch.no_grad():
        numbers = torch.arange(most + 1, dtype=torch.float32, device="cpu")
        return torch.cat([torch.log1p(chunk) for chunk in numbers.split(1 << 14)]).to(device)


class Positions:
    """The positions of the tokens of one forward, and the cos/sin and temperatures that follow, each computed once.

    ``positions_T`` is [T], or [3, T] for multimodal RoPE. The first use of a RoPE on a device builds its cache, so run
    a forward before capturing a CUDA graph. ``shared_kv`` are the rotated keys and the values of layers, by number,
    that later layers attend to.
    """

    def __init__(self, positions_T: Tensor, max_positions: int, dtype: torch.dtype, *, numerics: Numerics) -> None:
        self.mrope_3T = positions_T if positions_T.dim() == 2 else None
        self.positions_T = positions_T if self.mrope_3T is None else positions_T[0]
        self._max = max_positions
        self._dtype = dtype
        self.numerics = numerics
        self._cos_sin: dict[tuple[RopeSpec, int], Tensor] = {}
        self._temperatures: dict[tuple[float, float, float], Tensor] = {}
        self.shared_kv: dict[int, tuple[Tensor, Tensor]] = {}

    def cos_sin(self, rope: RopeSpec, head_dim: int) -> Tensor:
        """Return what ``apply_rotary`` needs, [T, 2, rope.dim or head_dim]."""
        key = (rope, rope.dim or head_dim)
        if key not in self._cos_sin:
            positions = self.positions_T if self.mrope_3T is None else self.mrope_3T
            self._cos_sin[key] = compute_cos_sin(*key, self._max, positions, self._dtype, numerics=self.numerics)
        return self._cos_sin[key]

    def cos_sin_cache(self, rope: RopeSpec, head_dim: int) -> Tensor | None:
        """Return cos/sin of all positions, [P, 2, rope.dim or head_dim], which ``positions_T`` indexes.

        None if there are too many to cache, or if a token has three positions.
        """
        if self.mrope_3T is not None or not _is_cached(self._max, self.positions_T.device, self.numerics):
            return None
        return _cos_sin_cache(rope, rope.dim or head_dim, self._max, self.positions_T.device, self._dtype)

    def cos_sin_table(self, rope: RopeSpec | None, head_dim: int) -> tuple[Tensor | None, Tensor | None]:
        """Return a cos/sin table and the positions to look up; or cos/sin for every token, and None."""
        if rope is None:
            return None, self.positions_T
        cache_P2d = self.cos_sin_cache(rope, head_dim)
        return (self.cos_sin(rope, head_dim).contiguous(), None) if cache_P2d is None else (cache_P2d, self.positions_T)

    def temperature(self, floor: float, slope: float, ahead: float = 1.0) -> Tensor:
        """Compute the factor of queries that grows every ``floor`` positions, float32 [T, 1, 1].

        The step comes ``ahead`` positions before a multiple of ``floor``.
        """
        key = (floor, slope, ahead)
        if key not in self._temperatures:
            steps_T = torch.floor((self.positions_T.to(torch.float32) + ahead) / floor)
            logs_T = torch.log1p(steps_T)
            if self.numerics.batch_invariant:  # looked up, as cos/sin are
                most = int((self._max + ahead) // floor) + 1
                logs_T = _log1p_table(most, steps_T.device).index_select(0, steps_T.long())
            self._temperatures[key] = (logs_T * slope + 1.0)[:, None, None]
        return self._temperatures[key]

    def log_temperature(self, floor: float, slope: float) -> Tensor:
        """Compute the factor of scores that grows with the logarithm of the tokens so far, float32 [T, 1, 1].

        It is one up to ``floor`` tokens.
        """
        ratios_T = ((self.positions_T.to(torch.float32) + 1.0) / floor).clamp(min=1.0)
        logs_T = map_elements(torch.log, ratios_T) if self.numerics.batch_invariant else ratios_T.log()
        return (logs_T * slope + 1.0)[:, None, None]


def _is_cached(max_positions: int, device: torch.device, numerics: Numerics) -> bool:
    """Whether cos/sin are looked up. On a CPU the cosine of an angle may depend on its neighbours in the vector."""
    if device.type == "cpu":
        return max_positions <= _MAX_CACHED_POSITIONS or numerics.batch_invariant
    return max_positions <= _MAX_CACHED_POSITIONS_ON_GPU


@lru_cache(maxsize=16)
def _channel_axes(rope: RopeSpec, device: torch.device) -> Tensor:
    """The axis of each rotated channel, [d]."""
    axes = rope.mrope_axes()
    with torch.inference_mode(False):
        channels = [axis for axis in axes for _ in range(2)] if rope.interleaved else [*axes, *axes]
        return torch.tensor(channels, device=device)


def compute_cos_sin(
    rope: RopeSpec, dim: int, max_positions: int, positions_T: Tensor, dtype: torch.dtype, *, numerics: Numerics
) -> Tensor:
    """Compute what ``apply_rotary`` needs for these positions, [T] or [3, T]: [T, 2, dim] in ``dtype``."""
    if positions_T.dim() == 2:
        assert rope.mrope_section is not None, "positions in time, height and width need multimodal RoPE"
        time_T2d, height_T2d, width_T2d = (
            compute_cos_sin(rope, dim, max_positions, axis_T, dtype, numerics=numerics) for axis_T in positions_T
        )
        axes_d = _channel_axes(rope, positions_T.device)
        return torch.where(axes_d == 0, time_T2d, torch.where(axes_d == 1, height_T2d, width_T2d))
    if _is_cached(max_positions, positions_T.device, numerics):
        return _cos_sin_cache(rope, dim, max_positions, positions_T.device, dtype).index_select(0, positions_T)
    freq_h = _inv_freq_on(rope, dim, max_positions, positions_T.device)
    return _build_cos_sin(torch.outer(positions_T.to(torch.float32), freq_h), rope).to(dtype)


def apply_rotary(x_TNd: Tensor, cos_sin_T2d: Tensor, *, interleaved: bool = False, numerics: Numerics) -> Tensor:
    """Rotate each head's channel pairs by their position's angles; channels beyond the rotated ones are unchanged."""
    if numerics.batch_invariant:
        return qk_norm_rope.apply_rope(x_TNd, cos_sin_T2d, interleaved=interleaved)
    dim = cos_sin_T2d.shape[-1]
    if dim < x_TNd.shape[-1]:
        rotated_TNd, rest_TNd = x_TNd.split((dim, x_TNd.shape[-1] - dim), dim=-1)
        rotated_TNd = apply_rotary(rotated_TNd, cos_sin_T2d, interleaved=interleaved, numerics=numerics)
        return torch.cat((rotated_TNd, rest_TNd), -1)
    cos_T1d, sin_T1d = cos_sin_T2d.split(1, dim=1)
    swapped_TNd = x_TNd.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if interleaved else x_TNd.roll(dim // 2, -1)
    return torch.addcmul(x_TNd * cos_T1d, swapped_TNd, sin_T1d)
