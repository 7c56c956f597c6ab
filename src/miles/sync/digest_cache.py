"""Digest cache: skips setup work for tensors that stay in the same storage between weight updates."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from miles.kernels.runtime.checksum import ChecksumBatch
from miles.sync.manifest import combine_sums_batch, compute_digests


class StorageTracker:
    """Detects whether tensors are in the same storages as last time, without keeping them alive."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._addresses: list[tuple[int, torch.dtype]] = []
        self._alive: list[StorageWeakRef] = []

    def same(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether names and storages equal those of the last call; they are recorded for the next."""
        names, addresses = list(tensors), [(tensor.data_ptr(), tensor.dtype) for tensor in tensors.values()]
        expired = torch.UntypedStorage._expired  # freed memory may have been reused
        if (
            names
            and names == self._names
            and addresses == self._addresses
            and not any(expired(ref.cdata) for ref in self._alive)
        ):
            return True
        self._names, self._addresses = names, addresses
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self._alive = [StorageWeakRef(storage) for storage in storages.values()]
        return False

    def forget(self) -> None:
        """Make the next call return False."""
        self._names = []


class DigestCache:
    """Digests of tensors that mostly stay in place: the device-side address table is built once."""

    def __init__(self) -> None:
        self._tracker = StorageTracker()
        self._checksum: ChecksumBatch | None = None

    def compute_digests(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Return the digests of all tensors."""
        if not all(tensor.is_cuda for tensor in tensors.values()):
            return compute_digests(tensors)
        if not self._tracker.same(tensors):
            self._checksum = None
            return compute_digests(tensors)
        if self._checksum is None:
            self._checksum = ChecksumBatch(list(tensors.values()))
        self._checksum.start()
        return dict(zip(tensors, combine_sums_batch(self._checksum.read()).tolist(), strict=True))
