"""Tensors that come through another process's memory, laid straight into tensors the engine can flip to.

They are counted while they are copied: the digest of a tensor is that of the very values that were stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.engine import NativeEngine
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.weights import DTYPES, Index, index_for
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.kernels.sums import Sums, sums_of
from miles.models.pieces import Piece
from miles.sync.manifest import Entry, joined
from miles.sync.window import opened, release, whereabouts

MOST_WINDOWS = 8


@dataclass(frozen=True, slots=True)
class Landed:
    """Whole tensors of the engine's own names, and the digests of those that came whole."""

    tensors: Mapping[str, Tensor]
    digests: Mapping[str, int]


class Landing:
    """Windows into a sender's memory, and what has come through them."""

    def __init__(self, engine: NativeEngine, ranks: int) -> None:
        self._engine, self._ranks = engine, ranks
        self._windows: list[Tensor] = []
        self._fresh: dict[str, Tensor] = {}
        self._sums: dict[str, Sums] = {}
        self._announced: Counter[str] | None = None
        self._fits: bool | None = None
        self._current: tuple[Mapping[str, Tensor], Index] | None = None
        self._version: Version | None = None
        self._device: torch.device | None = None

    def where(self) -> dict[str, Any]:
        """The machine and the device that a sender must share."""
        return {**whereabouts(self._on()), "ranks": self._ranks}

    def open(self, told: Sequence[Any]) -> None:
        """Look into the sender's windows from now on."""
        self.close()
        if not 0 < len(told) <= MOST_WINDOWS or not all(isinstance(one, Mapping) for one in told):
            raise SyncError(f"windows must be a list of 1 to {MOST_WINDOWS} objects.")
        self._windows = [opened(one, self._on()) for one in told]

    def views(self, fields: Fields, entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """The tensors that lie in a window now, as they were announced."""
        number = fields.maybe_integer("window", low=0, high=MOST_WINDOWS)
        names, offsets = fields.texts("names"), fields.integers("offsets")
        if number is None or number >= len(self._windows) or len(names) != len(offsets):
            raise SyncError("window must be one that is open, and names and offsets lists of one length.")
        memory, found = self._windows[number], {}
        for name, start in zip(names, offsets, strict=True):
            if name not in entries:
                raise SyncError(f"{name} was not announced.")
            entry = entries[name]
            kind = DTYPES.get(entry.dtype)
            size = 0 if kind is None else prod(entry.shape) * kind.itemsize
            if kind is None or start < 0 or start % 16 or start + size > memory.numel():
                raise SyncError(f"{name} does not lie within the window at {start}.")
            found[name] = memory[start : start + size].view(kind).view(entry.shape)
        return found

    def fits(self, entries: Mapping[str, Entry]) -> bool:
        """Can these be laid into place as they come? Else they are kept, and put into place at the end."""
        if self._ranks != 1:
            return False
        current, index = self._known()
        if self._fits is None:
            self._fits = all(
                name in index and _dtype(current[index[name][0]]) == entry.dtype for name, entry in entries.items()
            )
        return self._fits

    def lay(self, views: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> dict[str, Tensor]:
        """Copy into place, counting; the copies, by the sender's names."""
        current, index = self._known()
        if self._announced is None:
            self._announced = Counter[str]()
            for name in entries:
                self._announced[index[name][0]] += prod(index[name][1].shape)
        for ours in {index[name][0] for name in views} - self._fresh.keys():
            like = current[ours].detach()
            if self._announced[ours] == like.numel():
                self._fresh[ours] = torch.empty_like(like, memory_format=torch.contiguous_format)
            else:  # the rest of it stays
                self._fresh[ours] = like.clone(memory_format=torch.contiguous_format)
        places = {name: index[name][1].of(self._fresh[index[name][0]]) for name in views}
        straight = [name for name, place in places.items() if place.is_contiguous()]
        sums = sums_of([views[name] for name in straight], into=[places[name] for name in straight])
        self._sums |= zip(straight, sums, strict=True)
        for name in views.keys() - set(straight):
            places[name].copy_(views[name])
            self._sums[name] = sums_of([places[name]])[0]
        return places

    def fill(self, staying: Mapping[str, Tensor]) -> None:
        """What did not come of tensors of which another part did, by the sender's names: it stays as it is."""
        _, index = self._known()
        for name, tensor in staying.items():
            if index[name][0] in self._fresh:
                place = index[name][1].of(self._fresh[index[name][0]])
                place.copy_(tensor)
                self._sums[name] = sums_of([place])[0]

    def sums(self) -> Mapping[str, Sums]:
        """What was counted on the way, by the sender's names."""
        return self._sums

    def landed(self) -> Landed:
        """All of it; nothing is kept here. Refuses (SyncError) what was laid beside weights that are gone."""
        if not self._fresh:
            return Landed({}, {})
        _, index = self._known()
        if self._version != self._engine.version:
            self.forget()
            raise SyncError("The weights were changed by somebody else while a publication was under way.")
        parts: dict[str, list[tuple[int, Sums]] | None] = {ours: [] for ours in self._fresh}
        covered = dict.fromkeys(self._fresh, 0)
        for name, sums in self._sums.items():
            ours, piece = index[name]
            known = parts[ours]
            covered[ours] += prod(piece.shape)
            if piece.transposed or known is None:
                parts[ours] = None
            else:
                known.append((_start(piece, self._fresh[ours]), sums))
        whole = {ours: found for ours, found in parts.items() if covered[ours] == self._fresh[ours].numel()}
        digests = {ours: joined(found) for ours, found in whole.items() if found is not None}
        landed = Landed(self._fresh, digests)
        self.forget()
        return landed

    def forget(self) -> None:
        """Let go of what came, and of the windows."""
        self._fresh, self._sums, self._announced = {}, {}, None
        self._fits = self._current = None
        self.close()

    def close(self) -> None:
        """Let go of the windows."""
        if self._windows:
            self._windows = []
            release()

    def _known(self) -> tuple[Mapping[str, Tensor], Index]:
        """The engine's tensors and what senders call them, looked up once a publication."""
        if self._current is None:
            weights = self._engine.weights()
            self._current, self._version = (weights, index_for(self._engine.spec, weights)), self._engine.version
        return self._current

    def _on(self) -> torch.device:
        if self._device is None:
            weights = self._engine.weights()
            self._device = weights[list(weights)[1]].device
        return self._device


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _start(piece: Piece, tensor: Tensor) -> int:
    """The place of a piece's first element."""
    row = tensor[0].numel() if piece.expert is None else tensor[0, 0].numel()
    slab = 0 if piece.expert is None else piece.expert * tensor[0].numel()
    return slab + piece.start * row
