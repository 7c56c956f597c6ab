"""Forms that an optimizer keeps its moments in: float32, bfloat16, or eight bits a number.

Why the second moment is rounded at random: a step changes it by a thousandth of itself or less, which is under half of
the distance to bfloat16's next number (2^-8 of it), let alone to the next of eight bits. Rounded to the nearest it
would never fall again; rounded up or down by chance, in proportion, it is right on average. The first moment moves by
a tenth a step: bfloat16 may round it to the nearest, eight bits may not. The chance is a function of the update, the
parameter and the place alone, so a resumed run draws the same and copies of a parameter stay copies.

Eight bits: blocks of 256 numbers have a float32 scale, their largest magnitude; a number is a power of 2^(1/8) of it.
So its error is 4.5 % at most however small it is: down to 2^-31.75 of the largest for a second moment (codes 0 to
255), 2^-15.75 for a first (a sign, and 0 to 127), which is the same reach, as the second is of squares. A second moment
under that is rounded up, never to zero: Adam divides by its root.

Shapes: N numbers of a stretch, B blocks of 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

BLOCK = 256
_STEPS = 8  # codes an octave
_RISE = 2.0 ** (1 / _STEPS) - 1
# Norms and biases weigh nothing, and their blocks would mix unlike things.
SMALLEST = 4096

Chance = Callable[[Tensor], Tensor]
"""Uniform numbers in [0, 1), one for each number given."""
Raw = tuple[Tensor, ...]


class Form(Protocol):
    """How a flat row of float32 numbers is held: as ``Raw`` tensors, of which a stretch that starts and ends at
    multiples of 256, or at the end, can be cut."""

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> Raw:
        """As many zeros."""
        ...

    def cut(self, raw: Raw, start: int, stop: int) -> Raw:
        """A stretch: views."""
        ...

    def decode(self, raw: Raw) -> Tensor:
        """The numbers in float32; the very tensor where they are held so."""
        ...

    def encode(self, raw: Raw, values_N: Tensor, chance: Chance | None) -> None:
        """Write numbers; to the nearest without ``chance``."""
        ...


class Whole:
    """Float32."""

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> Raw:
        return (_zeros(count, torch.float32, device, pinned),)

    def cut(self, raw: Raw, start: int, stop: int) -> Raw:
        return (raw[0][start:stop],)

    def decode(self, raw: Raw) -> Tensor:
        return raw[0]

    def encode(self, raw: Raw, values_N: Tensor, chance: Chance | None) -> None:
        if raw[0].data_ptr() != values_N.data_ptr():
            raw[0].copy_(values_N)


class Half:
    """Bfloat16; ``random`` rounds up or down by chance."""

    def __init__(self, *, random: bool) -> None:
        self._random = random

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> Raw:
        return (_zeros(count, torch.bfloat16, device, pinned),)

    def cut(self, raw: Raw, start: int, stop: int) -> Raw:
        return (raw[0][start:stop],)

    def decode(self, raw: Raw) -> Tensor:
        return raw[0].float()

    def encode(self, raw: Raw, values_N: Tensor, chance: Chance | None) -> None:
        if self._random and chance is not None:
            # A float32 is a bfloat16 and 16 bits more: what these are worth is the chance of a carry.
            bits_N = values_N.float().view(torch.int32) + (chance(values_N) * 65536).to(torch.int32)
            values_N = (bits_N & -65536).view(torch.float32)
        raw[0].copy_(values_N)


class Coded:
    """Eight bits and a scale for every 256 numbers. ``signed`` ones are any, others are not negative."""

    def __init__(self, *, signed: bool) -> None:
        self._signed = signed
        self._top = 127 if signed else 255

    def zeros(self, count: int, device: torch.device, *, pinned: bool) -> Raw:
        codes_N = _zeros(count, torch.int8 if self._signed else torch.uint8, device, pinned)
        return codes_N, _zeros(-(-count // BLOCK), torch.float32, device, pinned)

    def cut(self, raw: Raw, start: int, stop: int) -> Raw:
        return raw[0][start:stop], raw[1][start // BLOCK : -(-stop // BLOCK)]

    def decode(self, raw: Raw) -> Tensor:
        codes_N, scale_B = raw
        size_N = codes_N.float().abs()
        values_N = torch.exp2((size_N - self._top) / _STEPS).mul_(_spread(scale_B, len(codes_N)))
        values_N = torch.where(size_N == 0, 0.0, values_N)
        return values_N.copysign_(codes_N) if self._signed else values_N

    def encode(self, raw: Raw, values_N: Tensor, chance: Chance | None) -> None:
        codes_N, scale_B = raw
        count = len(values_N)
        size_N = values_N.float().abs()
        padded = torch.nn.functional.pad(size_N, (0, len(scale_B) * BLOCK - count))
        scale_B.copy_(padded.view(-1, BLOCK).amax(1))
        share_N = size_N / _spread(scale_B, count).clamp(min=torch.finfo(torch.float32).tiny)
        exact_N = share_N.log2().mul_(_STEPS).add_(self._top)
        found_N = exact_N.round() if chance is None else self._drawn(share_N, exact_N, chance)
        found_N = found_N.clamp_(0.0 if self._signed else 1.0, float(self._top))
        found_N = torch.where(size_N == 0, 0.0, found_N)
        codes_N.copy_(found_N.copysign_(values_N) if self._signed else found_N)

    def _drawn(self, share_N: Tensor, exact_N: Tensor, chance: Chance) -> Tensor:
        """The code below or the one above, so that the mean is the number itself; zero is the code below the first."""
        below_N = exact_N.floor()
        part_N = torch.exp2((exact_N - below_N) / _STEPS).sub_(1.0).div_(_RISE)
        first = 2.0 ** ((1 - self._top) / _STEPS)
        part_N = torch.where(below_N < 1, share_N / first, part_N)
        return below_N.clamp_(min=0.0) + (chance(share_N) < part_N)


def forms(dtype: str, count: int) -> tuple[Form, Form]:
    """How a first and a second moment of so many numbers are held under ``--optimizer-state-dtype``."""
    if dtype == "bfloat16":
        return Half(random=False), Half(random=True)
    if dtype == "int8" and count >= SMALLEST:
        return Coded(signed=True), Coded(signed=False)
    return Whole(), Whole()


def chance_of(seed: int, device: torch.device) -> Chance:
    """Chance that is the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator, device=like.device)

    return draw


def _spread(scale_B: Tensor, count: int) -> Tensor:
    return scale_B.repeat_interleave(BLOCK)[:count]


def _zeros(count: int, dtype: torch.dtype, device: torch.device, pinned: bool) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=device, pin_memory=pinned)
