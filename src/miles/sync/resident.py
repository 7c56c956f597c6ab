"""Tensors that stay where they are from one publication to the next, and what is spared by knowing it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from miles.kernels.sums import Tally
from miles.sync.manifest import digests, folded_all


class Resident:
    """Whether tensors are those of the last time. It keeps none of them: memory that is let go of is free."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._at: list[tuple[int, torch.dtype]] = []
        self._alive: list[StorageWeakRef] = []

    def same(self, tensors: Mapping[str, Tensor]) -> bool:
        """Are these the tensors, in the memory, that were given the last time? They are remembered for the next."""
        names, at = list(tensors), [(tensor.data_ptr(), tensor.dtype) for tensor in tensors.values()]
        expired = torch.UntypedStorage._expired  # a memory that was freed may have been given out again
        if names and names == self._names and at == self._at and not any(expired(one.cdata) for one in self._alive):
            return True
        self._names, self._at = names, at
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors.values()}
        self._alive = [StorageWeakRef(storage) for storage in storages.values()]
        return False

    def forget(self) -> None:
        """The next are not those of the last time, whatever they are."""
        self._names = []


class Counted:
    """The digests of tensors that mostly are where they were: a device is told once where that is."""

    def __init__(self) -> None:
        self._resident = Resident()
        self._tally: Tally | None = None

    def digests(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Of all, as they are now."""
        if not all(tensor.is_cuda for tensor in tensors.values()):
            return digests(tensors)
        if not self._resident.same(tensors):
            self._tally = None
            return digests(tensors)
        if self._tally is None:
            self._tally = Tally(list(tensors.values()))
        self._tally.start()
        return dict(zip(tensors, folded_all(self._tally.read()).tolist(), strict=True))
