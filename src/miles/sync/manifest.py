"""What a publication promises (names, shapes, dtypes, digests) and who may receive one.

A digest is two wrapping 64-bit sums over the tensor's bit pattern, one of them weighted by position,
folded into one integer. Integer sums do not depend on the order they are taken in, so the same bits
give the same digest on every device, at the speed of reading them once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miles.core.types import Version

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a publication."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a version consists of."""

    version: Version
    entries: tuple[Entry, ...]


class Receiver(Protocol):
    """An engine's side of a publication. Until ``commit`` returns it serves the version before."""

    name: str

    def begin(self, manifest: Manifest) -> None:
        """Refuse (SyncError) names, shapes or dtypes that are not this model's."""
        ...

    def receive(self, name: str, tensor: Tensor) -> None:
        """Stage one tensor; the receiver may keep the very tensor it is given."""
        ...

    def verify(self) -> None:
        """Refuse (SyncError) unless everything is staged and every digest is right; nothing changes yet."""
        ...

    def commit(self) -> None:
        """Flip at once to what was verified; later tokens carry the new version."""
        ...

    def rollback(self) -> None:
        """Forget what was staged."""
        ...


def digest(tensor: Tensor) -> int:
    """A number that changes with any one element of ``tensor``, and almost surely with any of its bits."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    plain = torch.zeros((), dtype=torch.int64, device=bits.device)
    placed = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + chunk.numel(), device=bits.device)
        plain += chunk.sum()
        placed += (chunk * (place * 0x9E3779B2)).sum()
    # each element ends up times an odd number (odd + even), so no single element can change unseen
    return (int(plain) * 0x9E3779B97F4A7C15 + int(placed)) & 0xFFFFFFFFFFFFFFFF


def manifest_of(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Describe ``tensors`` as they are now."""
    entries = tuple(
        Entry(name=name, shape=tuple(t.shape), dtype=str(t.dtype), digest=digest(t)) for name, t in tensors.items()
    )
    return Manifest(version=version, entries=entries)
