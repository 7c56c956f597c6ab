"""What a publication promises (names, shapes, dtypes, digests) and who may receive one.

A digest is two wrapping 64-bit sums over the tensor's bit pattern, one of them weighted by position,
folded into one integer. Integer sums do not depend on the order they are taken in, so the same bits
give the same digest on every device, at the speed of reading them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from miles.core.types import Version
from miles.kernels.sums import Sums, sums_of


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


def folded(sums: Sums) -> int:
    """The digest of a tensor whose plain and placed sums these are."""
    plain, placed = sums
    # each element ends up times an odd number (odd + even), so no single element can change unseen
    return (plain * 0x9E3779B97F4A7C15 + placed * 0x9E3779B2) & 0xFFFFFFFFFFFFFFFF


def digest(tensor: Tensor) -> int:
    """A number that changes with any one element of ``tensor``, and almost surely with any of its bits."""
    return folded(sums_of([tensor])[0])


def digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Of many, in one pass where they are on one device."""
    return {name: folded(sums) for name, sums in zip(tensors, sums_of(list(tensors.values())), strict=True)}


def joined(parts: Iterable[tuple[int, Sums]]) -> int:
    """The digest of a tensor from the sums of its parts and the place each begins at."""
    plain = placed = 0
    for start, (part_plain, part_placed) in parts:
        plain += part_plain
        placed += part_placed + start * part_plain
    return folded((plain, placed))


def manifest_of(version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
    """Describe ``tensors`` as they are now."""
    found = digests(tensors)
    entries = tuple(
        Entry(name=name, shape=tuple(t.shape), dtype=str(t.dtype), digest=found[name]) for name, t in tensors.items()
    )
    return Manifest(version=version, entries=entries)
