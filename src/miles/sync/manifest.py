"""Manifest of a weight update (names, shapes, dtypes, digests) and the protocol of its receivers.

A digest is two wrapping 64-bit sums over the tensor's bit pattern, one of them weighted by position,
combined into one integer. Integer sums do not depend on order, so the same bits
give the same digest on every device, at the cost of one read.
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
from miles.kernels.runtime.checksum import Checksum, compute_checksums


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestEntry:
    """One tensor of a weight update."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """All tensors of a version."""

    version: Version
    entries: tuple[ManifestEntry, ...]


class Receiver(Protocol):
    """An engine's side of a weight update. Until ``commit`` returns it serves the previous version."""

    name: str

    def begin(self, manifest: Manifest) -> None:
        """SyncError if names, shapes or dtypes are not this model's."""
        ...

    def receive(self, name: str, tensor: Tensor, *, own: bool) -> None:
        """Stage one tensor; the receiver may keep it, and may overwrite it later if it is its ``own``."""
        ...

    def verify(self) -> None:
        """SyncError unless everything is staged with matching digests; nothing changes yet."""
        ...

    def commit(self) -> None:
        """Switch atomically to the verified weights; later tokens carry the new version."""
        ...

    def rollback(self) -> None:
        """Discard what was staged."""
        ...


def combine_sums(sums: Checksum) -> int:
    """Return the digest of a tensor from its plain and position-weighted sums."""
    plain, placed = sums
    # each element is multiplied by an odd number (odd + even), so a change of any single element is detected
    return (plain * 0x9E3779B97F4A7C15 + placed * 0x9E3779B2) & 0xFFFFFFFFFFFFFFFF


def combine_sums_batch(sums_N2: Array) -> Array:
    """Return the digests of many tensors, [N]."""
    return sums_N2[:, 0] * np.uint64(0x9E3779B97F4A7C15) + sums_N2[:, 1] * np.uint64(0x9E3779B2)


def encode_digests(digests_N: Array) -> str:
    """Encode digests as base64 of little-endian bytes."""
    return base64.b64encode(digests_N.astype("<u8").tobytes()).decode("ascii")


def decode_digests(text: str, count: int) -> Array:
    """Decode ``count`` digests; SyncError if the text is invalid."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"Digests must be base64: {error}.") from error
    if len(raw) != 8 * count:
        raise SyncError(f"There are {len(raw) / 8:g} digests for {count} tensors.")
    return np.frombuffer(raw, "<u8").astype(np.uint64)


def compute_digest(tensor: Tensor) -> int:
    """Return a digest that changes with any single element of ``tensor``, and almost surely with any of its bits."""
    return combine_sums(compute_checksums([tensor])[0])


def compute_digests(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the digests of many tensors, in one pass if they are on one device."""
    return {
        name: combine_sums(sums) for name, sums in zip(tensors, compute_checksums(list(tensors.values())), strict=True)
    }


def digest_from_parts(parts: Iterable[tuple[int, Checksum]]) -> int:
    """Return the digest of a tensor from the sums of its parts and their start positions."""
    plain = placed = 0
    for start, (part_plain, part_placed) in parts:
        plain += part_plain
        placed += part_placed + start * part_plain
    return combine_sums((plain, placed))


def build_manifest(
    version: Version, tensors: Mapping[str, Tensor], digests: Mapping[str, int] | None = None
) -> Manifest:
    """Build the manifest of ``tensors``; ``digests`` may be passed if already computed."""
    digests = compute_digests(tensors) if digests is None else digests
    entries = tuple(
        ManifestEntry(name=name, shape=tuple(t.shape), dtype=str(t.dtype), digest=digests[name])
        for name, t in tensors.items()
    )
    return Manifest(version=version, entries=entries)
