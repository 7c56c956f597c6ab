"""Weights written over in place, straight out of the memory another process computes with, in one pass that counts.

A sender tells once where its tensors lie (``map``, an epoch); each publication after that is a ``write`` and a commit
with the digests that must have come out. Tensors stay where they are, so recorded steps stay good, and nothing is held
twice. In between the engine makes no step: what was written is either proven and committed, or written over again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine import NativeEngine
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.weights import DTYPES, index_for
from miles.core.errors import SyncError
from miles.core.types import Array, Version
from miles.kernels.sums import Tally
from miles.sync.manifest import folded_all, heard, told
from miles.sync.window import opened, release

MOST_STORAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class Mapped:
    """An epoch: views of the sender's tensors by name, and the memory they lie in."""

    epoch: str
    views: Mapping[str, Tensor]


class Writing:
    """The memory of one sender, and what was written out of it."""

    def __init__(self, engine: NativeEngine, ranks: int) -> None:
        self._engine, self._ranks = engine, ranks
        self._mapped: Mapped | None = None
        self._passes: list[tuple[Array, Tally]] = []
        self._made_for: tuple[str, bytes, Version | None] | None = None
        self._found: Array | None = None

    def step(self, action: str, fields: Fields) -> dict[str, Any]:
        """``map`` or ``write``: what the sender is told of it."""
        if action == "write":
            return self.write(fields)
        self.map(fields)
        return {}

    def map(self, fields: Fields) -> None:
        """Look into a sender's memory from now on; refuses what is not this model's, or not as it lies here."""
        self._forget()
        if self._ranks != 1:
            raise SyncError("The ranks of this server share the model: what is written in place must be all on one.")
        current = self._engine.weights()
        device = next(iter(current.values())).device
        given = fields.array("storages") or []
        if not 0 < len(given) <= MOST_STORAGES or not all(isinstance(one, Mapping) for one in given):
            raise SyncError(f"storages must be a list of 1 to {MOST_STORAGES} objects.")
        storages = [opened(one, device) for one in given]
        views = _views(fields, storages)
        self._places(list(views), views)
        self._mapped = Mapped(fields.needed_text("epoch"), views)

    def write(self, fields: Fields) -> dict[str, Any]:
        """Write over what ``which`` marks (all, without), and count everything; the digests, in the order of the epoch.

        The engine must rest. When this returns the copies are over.
        """
        mapped = self._mapped
        if mapped is None or fields.needed_text("epoch") != mapped.epoch:
            raise SyncError("This server does not look into that memory of the sender's; map it first.")
        if not self._engine.resting:
            raise SyncError("Weights are written in place only while generation is paused.")
        self._prepare(mapped, _marks(fields.text("which"), len(mapped.views)))
        self._found = None
        found_N = np.zeros(len(mapped.views), np.uint64)

        def write() -> None:
            with torch.inference_mode():
                for _, tally in self._passes:
                    tally.start()
                for which, tally in self._passes:
                    found_N[which] = folded_all(tally.read())

        self._engine.rewrite(write)
        self._found = found_N
        return {"digests": told(found_N)}

    def commit(self, fields: Fields) -> Version:
        """Take what was written for the next version, where it is what the sender ``promised``; else refuse it."""
        mapped, found_N = self._mapped, self._found
        if mapped is None or found_N is None:
            raise SyncError("There is nothing written to commit.")
        promised_N = heard(fields.needed_text("promised"), len(found_N))
        wrong = np.flatnonzero(found_N != promised_N)
        if len(wrong):
            name = list(mapped.views)[wrong[0]]
            raise SyncError(f"{name} has digest {found_N[wrong[0]]}, and the sender's is {promised_N[wrong[0]]}.")
        self._found = None
        before = self._engine.version
        version = Version() if before is None else before.next()
        self._engine.rewritten(version)
        if self._made_for is not None and self._made_for[2] == before:
            self._made_for = (*self._made_for[:2], version)
        return version

    def _prepare(self, mapped: Mapped, marked: Array) -> None:
        """What a device must know of this write; that of the last one, where no other tensors were adopted since."""
        key = (mapped.epoch, marked.tobytes(), self._engine.version)
        if key == self._made_for:
            return
        names = list(mapped.views)
        places = self._places(names, mapped.views)
        chosen, kept = np.flatnonzero(marked), np.flatnonzero(~marked)
        self._passes = []
        if len(chosen):
            sources = [mapped.views[names[i]] for i in chosen]
            self._passes.append((chosen, Tally(sources, [places[i] for i in chosen])))
        if len(kept):
            self._passes.append((kept, Tally([places[i] for i in kept])))
        self._made_for = key

    def _places(self, names: Sequence[str], views: Mapping[str, Tensor]) -> list[Tensor]:
        """Where in the engine's tensors each goes; together they must be all of them, each once."""
        current = self._engine.weights()
        index = index_for(self._engine.spec, current)
        places: list[Tensor] = []
        for name in names:
            if name not in index:
                raise SyncError(f"{name} is not a tensor of this model.")
            ours, piece = index[name]
            place, view = piece.of(current[ours].detach()), views[name]
            if place.shape != view.shape or place.dtype != view.dtype:
                raise SyncError(f"{name} is {view.dtype} of {tuple(view.shape)}, and here it is {_said(place)}.")
            if not place.is_contiguous():
                raise SyncError(f"{name} does not lie in one piece here.")
            places.append(place)
        spans = sorted((place.data_ptr(), place.data_ptr() + place.nbytes) for place in places)
        if any(after[0] < before[1] for before, after in pairwise(spans)):
            raise SyncError("Two of the tensors are parts of one another here.")
        if sum(place.nbytes for place in places) != sum(tensor.nbytes for tensor in current.values()):
            raise SyncError("The tensors are not all of this model.")
        return places

    def _forget(self) -> None:
        self._passes, self._made_for, self._found = [], None, None
        if self._mapped is not None:
            self._mapped = None
            release()


def _views(fields: Fields, storages: Sequence[Tensor]) -> dict[str, Tensor]:
    """The sender's tensors, each within a memory it told of."""
    names, kinds, shapes = fields.texts("names"), fields.texts("dtypes"), fields.array("shapes") or []
    lie_in, offsets = fields.integers("lie_in"), fields.integers("offsets")
    if not len(names) == len(kinds) == len(shapes) == len(lie_in) == len(offsets) == len(set(names)):
        raise SyncError("names (each once), dtypes, shapes, lie_in and offsets must be lists of one length.")
    found: dict[str, Tensor] = {}
    for name, word, size, number, start in zip(names, kinds, shapes, lie_in, offsets, strict=True):
        shape, kind = Fields({"shapes": size}).integers("shapes"), DTYPES.get(word)
        if kind is None or not 0 <= number < len(storages) or any(n < 0 for n in shape):
            raise SyncError(f"{name} is {word} of {shape} in memory {number}, which cannot be.")
        stop = start + prod(shape) * kind.itemsize
        if start < 0 or start % kind.itemsize or stop > storages[number].numel():
            raise SyncError(f"{name} does not lie within the memory at {start}.")
        found[name] = storages[number][start:stop].view(kind).view(tuple(shape))
    return found


def _marks(text: str | None, count: int) -> Array:
    """Which tensors are meant: a bit each in base64, the first the highest of its byte; all, where there is no text."""
    if text is None:
        return np.ones(count, bool)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"which must be base64: {error}.") from error
    if len(raw) != -(-count // 8):
        raise SyncError(f"which has {len(raw)} bytes, and there are {count} tensors.")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(bool)


def _said(tensor: Tensor) -> str:
    return f"{tensor.dtype} of {tuple(tensor.shape)}"
