"""What a publication promises (names, shapes, dtypes, digests) and who may receive one.

A digest is two wrapping 64-bit sums over the tensor's bit pattern, one of them weighted by position,
folded into one integer. Integer sums do not depend on the order they are taken in, so the same bits
give the same digest on every device, at the speed of reading them once.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from miles.core.errors import SyncError
from miles.core.types import Array, Version
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

    def receive(self, name: str, tensor: Tensor, *, own: bool) -> None:
        """Stage one tensor; the receiver may keep the very tensor it is given, and its ``own`` may write over later."""
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


def folded_all(sums_N2: Array) -> Array:
    """The digests of many, [N]."""
    return sums_N2[:, 0] * np.uint64(0x9E3779B97F4A7C15) + sums_N2[:, 1] * np.uint64(0x9E3779B2)


def told(digests_N: Array) -> str:
    """Digests as a text: base64 of their bytes, the least first."""
    return base64.b64encode(digests_N.astype("<u8").tobytes()).decode("ascii")


def heard(text: str, count: int) -> Array:
    """The ``count`` digests of a text; refuses (SyncError) another."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"Digests must be base64: {error}.") from error
    if len(raw) != 8 * count:
        raise SyncError(f"There are {len(raw) / 8:g} digests, and {count} tensors.")
    return np.frombuffer(raw, "<u8").astype(np.uint64)


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


def manifest_of(version: Version, tensors: Mapping[str, Tensor], found: Mapping[str, int] | None = None) -> Manifest:
    """Describe ``tensors`` as they are now; ``found`` are their digests, where these were just taken."""
    found = digests(tensors) if found is None else found
    entries = tuple(
        Entry(name=name, shape=tuple(t.shape), dtype=str(t.dtype), digest=found[name]) for name, t in tensors.items()
    )
    return Manifest(version=version, entries=entries)
