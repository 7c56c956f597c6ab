"""Storage formats of optimizer moments: float32, bfloat16, or block-quantized 8 bit.

Why stochastic rounding of the second moment: a step changes it by a relative 1e-3 or less, which is under half of
the spacing of bfloat16 (2^-8), let alone of 8 bits. Rounded to nearest it would never decrease again; rounded
stochastically it is right on average. The first moment changes by about 10 % a step: bfloat16 may round it to nearest,
8 bits may not. The random numbers depend only on the update, the parameter and the position, so a resumed run repeats
them and replicas of a parameter stay equal.

8 bit: blocks of 256 values have a float32 scale, their largest magnitude; a value is a power of 2^(1/8) times it.
So the relative error is at most 4.5 % down to 2^-31.75 of the largest for a second moment (codes 0 to
255) and 2^-15.75 for a first (a sign, and 0 to 127), the same range, because the second is of squares. A smaller second
moment is rounded up, never to zero, because Adam divides by its root.

Shapes: N elements of a slice, B blocks of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
_STEPS = 8  # codes per octave
_RISE = 2.0 ** (1 / _STEPS) - 1
# Smaller tensors (norms and biases) need little memory and quantize badly.
MIN_QUANTIZED_NUMEL = 4096

RandomFn = Callable[[Tensor], Tensor]
"""Uniform random numbers in [0, 1), one per element."""
RawState = tuple[Tensor, ...]


class StateFormat(Protocol):
    """Storage format of a flat float32 array as ``RawState`` tensors, which can be sliced at multiples of 256."""

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> RawState:
        """Return ``count`` zeros."""
        ...

    def slice(self, raw: RawState, start: int, stop: int) -> RawState:
        """Return views of a slice."""
        ...

    def decode(self, raw: RawState) -> Tensor:
        """Return the values in float32; the tensor itself if stored as such."""
        ...

    def encode(self, raw: RawState, values_N: Tensor, random: RandomFn | None) -> None:
        """Write values; rounded to nearest without ``random``."""
        ...


class Float32State:
    """Unquantized float32."""

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> RawState:
        return (_zeros(count, torch.float32, device, pinned),)

    def slice(self, raw: RawState, start: int, stop: int) -> RawState:
        return (raw[0][start:stop],)

    def decode(self, raw: RawState) -> Tensor:
        return raw[0]

    def encode(self, raw: RawState, values_N: Tensor, random: RandomFn | None) -> None:
        if raw[0].data_ptr() != values_N.data_ptr():
            raw[0].copy_(values_N)


class BFloat16State:
    """Bfloat16, optionally with stochastic rounding."""

    def __init__(self, *, stochastic: bool) -> None:
        self._stochastic = stochastic

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> RawState:
        return (_zeros(count, torch.bfloat16, device, pinned),)

    def slice(self, raw: RawState, start: int, stop: int) -> RawState:
        return (raw[0][start:stop],)

    def decode(self, raw: RawState) -> Tensor:
        return raw[0].float()

    def encode(self, raw: RawState, values_N: Tensor, random: RandomFn | None) -> None:
        if self._stochastic and random is not None:
            # A float32 is a bfloat16 and 16 more bits, which are the probability of a carry.
            bits_N = values_N.float().view(torch.int32) + (random(values_N) * 65536).to(torch.int32)
            values_N = (bits_N & -65536).view(torch.float32)
        raw[0].copy_(values_N)


class Int8State:
    """8 bit with a scale per 256 values; unsigned values are not negative."""

    def __init__(self, *, signed: bool) -> None:
        self._signed = signed
        self._top = 127 if signed else 255

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> RawState:
        codes_N = _zeros(count, torch.int8 if self._signed else torch.uint8, device, pinned)
        return codes_N, _zeros(-(-count // BLOCK), torch.float32, device, pinned)

    def slice(self, raw: RawState, start: int, stop: int) -> RawState:
        return raw[0][start:stop], raw[1][start // BLOCK : -(-stop // BLOCK)]

    def decode(self, raw: RawState) -> Tensor:
        codes_N, scale_B = raw
        size_N = codes_N.float().abs()
        values_N = torch.exp2((size_N - self._top) / _STEPS).mul_(_expand_scale(scale_B, len(codes_N)))
        values_N = torch.where(size_N == 0, 0.0, values_N)
        return values_N.copysign_(codes_N) if self._signed else values_N

    def encode(self, raw: RawState, values_N: Tensor, random: RandomFn | None) -> None:
        codes_N, scale_B = raw
        count = len(values_N)
        size_N = values_N.float().abs()
        padded = torch.nn.functional.pad(size_N, (0, len(scale_B) * BLOCK - count))
        scale_B.copy_(padded.view(-1, BLOCK).amax(1))
        share_N = size_N / _expand_scale(scale_B, count).clamp(min=torch.finfo(torch.float32).tiny)
        exact_N = share_N.log2().mul_(_STEPS).add_(self._top)
        codes = exact_N.round() if random is None else self._round_stochastically(share_N, exact_N, random)
        codes = codes.clamp_(0.0 if self._signed else 1.0, float(self._top))
        codes = torch.where(size_N == 0, 0.0, codes)
        codes_N.copy_(codes.copysign_(values_N) if self._signed else codes)

    def _round_stochastically(self, share_N: Tensor, exact_N: Tensor, random: RandomFn) -> Tensor:
        """Round to the code below or above, so that the mean is the value itself; zero is the code below the first."""
        below_N = exact_N.floor()
        part_N = torch.exp2((exact_N - below_N) / _STEPS).sub_(1.0).div_(_RISE)
        first = 2.0 ** ((1 - self._top) / _STEPS)
        part_N = torch.where(below_N < 1, share_N / first, part_N)
        return below_N.clamp_(min=0.0) + (random(share_N) < part_N)


def select_formats(dtype: str, count: int) -> tuple[StateFormat, StateFormat]:
    """Return the formats of first and second moment of so many elements under ``--optimizer-state-dtype``."""
    if dtype == "bfloat16":
        return BFloat16State(stochastic=False), BFloat16State(stochastic=True)
    if dtype == "int8" and count >= MIN_QUANTIZED_NUMEL:
        return Int8State(signed=True), Int8State(signed=False)
    return Float32State(), Float32State()


def make_random_fn(seed: int, device: torch.device) -> RandomFn:
    """Return a random function with a fixed seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def sample(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, device=like.device)

    return sample


def _expand_scale(scale_B: Tensor, count: int) -> Tensor:
    return scale_B.repeat_interleave(BLOCK)[:count]


def _zeros(count: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned)
