"""Weights received over CUDA IPC: copied from windows of a sender's memory into tensors the engine can switch to.

Checksums are computed during the copy, so a tensor's digest is that of the very values that were stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.admin_bodies import PublicationBody
from miles.backends.native.server.weights.update import DTYPES, TensorIndex, build_index, find_small_tensor
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.kernels.runtime.checksum import Checksum, compute_checksums
from miles.models.checkpoint.param_slices import HfSlice
from miles.sync.manifest import ManifestEntry, digest_from_parts
from miles.sync.shared_memory import describe_location, open_handle, release_ipc

MAX_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Whole tensors by the engine's own names, and the digests of those that were received as a whole."""

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]


class IpcReceiver:
    """Windows into a sender's memory, and the tensors copied from them."""

    def __init__(self, engine: NativeEngine, num_ranks: int) -> None:
        self._engine = engine
        self._num_ranks = num_ranks
        self._windows: list[Tensor] = []
        self._fresh: dict[str, Tensor] = {}
        self._checksums: dict[str, Checksum] = {}
        self._announced: Counter[str] | None = None
        self._can_place: bool | None = None
        self._current: tuple[Mapping[str, Tensor], TensorIndex] | None = None
        self._version: Version | None = None
        self._device: torch.device | None = None

    def describe_location(self) -> dict[str, Any]:
        """The machine and device that a sender must share."""
        return {**describe_location(self._find_device()), "ranks": self._num_ranks}

    def open(self, handles: list[dict[str, Any]]) -> None:
        """Map the sender's windows."""
        self.close()
        if not 0 < len(handles) <= MAX_WINDOWS:
            raise SyncError(f"windows must be a list of 1 to {MAX_WINDOWS} objects.")
        self._windows = [open_handle(handle, self._find_device()) for handle in handles]

    def build_views(self, body: PublicationBody, entries: Mapping[str, ManifestEntry]) -> dict[str, Tensor]:
        """The tensors that are in a window now, as the manifest announced them."""
        number, names, offsets = body.window, body.names, body.offsets
        if number is None or number >= len(self._windows) or len(names) != len(offsets):
            raise SyncError("window must be an open one, and names and offsets lists of one length.")
        memory = self._windows[number]
        views: dict[str, Tensor] = {}
        for name, start in zip(names, offsets, strict=True):
            if name not in entries:
                raise SyncError(f"{name} is not in the manifest.")
            entry = entries[name]
            dtype = DTYPES.get(entry.dtype)
            size = 0 if dtype is None else prod(entry.shape) * dtype.itemsize
            if dtype is None or start < 0 or start % 16 or start + size > memory.numel():
                raise SyncError(f"{name} is not within the window at {start}.")
            views[name] = memory[start : start + size].view(dtype).view(entry.shape)
        return views

    def can_place(self, entries: Mapping[str, ManifestEntry]) -> bool:
        """Whether tensors can be copied into place as they arrive; otherwise they are kept until the end."""
        if self._num_ranks != 1:
            return False
        current, index = self._get_current()
        if self._can_place is None:
            self._can_place = all(
                name in index and str(current[index[name][0]].dtype).removeprefix("torch.") == entry.dtype
                for name, entry in entries.items()
            )
        return self._can_place

    def place(self, views: Mapping[str, Tensor], entries: Mapping[str, ManifestEntry]) -> dict[str, Tensor]:
        """Copy into place and compute checksums; returns the copies by the sender's names."""
        current, index = self._get_current()
        if self._announced is None:
            self._announced = Counter[str]()
            for name in entries:
                self._announced[index[name][0]] += prod(index[name][1].shape)
        for own_name in {index[name][0] for name in views} - self._fresh.keys():
            like = current[own_name].detach()
            if self._announced[own_name] == like.numel():
                self._fresh[own_name] = torch.empty_like(like, memory_format=torch.contiguous_format)
            else:  # the rest of it stays
                self._fresh[own_name] = like.clone(memory_format=torch.contiguous_format)
        targets = {name: index[name][1].view(self._fresh[index[name][0]]) for name in views}
        contiguous = [name for name, target in targets.items() if target.is_contiguous()]
        sources = [views[name] for name in contiguous]
        checksums = compute_checksums(sources, into=[targets[name] for name in contiguous])
        self._checksums |= zip(contiguous, checksums, strict=True)
        for name in views.keys() - set(contiguous):
            targets[name].copy_(views[name])
            self._checksums[name] = compute_checksums([targets[name]])[0]
        return targets

    def fill(self, unchanged: Mapping[str, Tensor]) -> None:
        """Copy the unchanged parts of tensors of which another part was received, by the sender's names."""
        _, index = self._get_current()
        for name, tensor in unchanged.items():
            own_name, piece = index[name]
            if own_name in self._fresh:
                target = piece.view(self._fresh[own_name])
                target.copy_(tensor)
                self._checksums[name] = compute_checksums([target])[0]

    @property
    def checksums(self) -> Mapping[str, Checksum]:
        """The checksums computed so far, by the sender's names."""
        return self._checksums

    def take(self) -> ReceivedWeights:
        """Hand over everything; refuses (SyncError) what was placed beside weights that were replaced since."""
        if not self._fresh:
            return ReceivedWeights({}, {})
        _, index = self._get_current()
        if self._version != self._engine.version:
            self.reset()
            raise SyncError("Another update changed the weights while a publication was running.")
        parts: dict[str, list[tuple[int, Checksum]] | None] = {name: [] for name in self._fresh}
        covered = dict.fromkeys(self._fresh, 0)
        for hf_name, checksum in self._checksums.items():
            name, piece = index[hf_name]
            known = parts[name]
            covered[name] += prod(piece.shape)
            if piece.transposed or piece.matrix_rows is not None or known is None:
                parts[name] = None
            else:
                known.append((_find_start(piece, self._fresh[name]), checksum))
        whole = {name: known for name, known in parts.items() if covered[name] == self._fresh[name].numel()}
        digests = {name: digest_from_parts(known) for name, known in whole.items() if known is not None}
        received = ReceivedWeights(self._fresh, digests)
        self.reset()
        return received

    def reset(self) -> None:
        """Drop what was received, and the windows."""
        self._fresh = {}
        self._checksums = {}
        self._announced = None
        self._can_place = None
        self._current = None
        self.close()

    def close(self) -> None:
        """Unmap the windows."""
        if self._windows:
            self._windows = []
            release_ipc()

    def _get_current(self) -> tuple[Mapping[str, Tensor], TensorIndex]:
        """The engine's tensors and their index, looked up once per publication."""
        if self._current is None:
            weights = self._engine.weights()
            self._current = (weights, build_index(self._engine.spec, weights))
            self._version = self._engine.version
        return self._current

    def _find_device(self) -> torch.device:
        if self._device is None:
            self._device = find_small_tensor(self._engine).device
        return self._device


def _find_start(piece: HfSlice, tensor: Tensor) -> int:
    """The position of a slice's first element."""
    row = tensor[0].numel() if piece.expert is None else tensor[0, 0].numel()
    expert_start = 0 if piece.expert is None else piece.expert * tensor[0].numel()
    return expert_start + piece.start * row
