"""In-place weight updates over CUDA IPC: copies straight from a sender's memory, computing checksums in the same pass.

A sender describes its tensors once (``map``, an epoch); each publication after that is a ``write`` and a commit with
the digests that must result. Tensors keep their addresses, so CUDA graphs stay valid and nothing is stored twice. In
between the engine makes no step: what was written is either verified and committed, or overwritten again.
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

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.admin_bodies import PublicationBody
from miles.backends.native.server.weights.update import DTYPES, build_index
from miles.core.errors import SyncError
from miles.core.types import Array, Version
from miles.kernels.runtime.checksum import ChecksumBatch
from miles.sync.manifest import combine_sums_batch, decode_digests, encode_digests
from miles.sync.shared_memory import open_handle, release_ipc

MAX_STORAGES = 1 << 16


@dataclass(frozen=True, slots=True)
class MappedMemory:
    """An epoch: views of the sender's tensors by name."""

    epoch: str
    views: Mapping[str, Tensor]


class InplaceWriter:
    """The mapped memory of one sender, and what was written from it."""

    def __init__(self, engine: NativeEngine, num_ranks: int) -> None:
        self._engine = engine
        self._num_ranks = num_ranks
        self._mapped: MappedMemory | None = None
        self._passes: list[tuple[Array, ChecksumBatch]] = []
        self._prepared_for: tuple[str, bytes, Version | None] | None = None
        self._digests: Array | None = None

    def run_step(self, body: PublicationBody) -> dict[str, Any]:
        """The actions ``map`` and ``write``; returns what the response contains besides the success."""
        if body.action == "write":
            return self.write(body.epoch, body.which)
        self.map(body)
        return {}

    def map(self, body: PublicationBody) -> None:
        """Map a sender's memory; refuses tensors that are not this model's, or differ in shape or dtype."""
        self.unmap()
        if self._num_ranks != 1:
            raise SyncError("The ranks of this server share the model, but an in-place update needs all of it on one.")
        if not body.epoch:
            raise SyncError("epoch is missing.")
        device = next(iter(self._engine.weights().values())).device
        if not 0 < len(body.storages) <= MAX_STORAGES:
            raise SyncError(f"storages must be a list of 1 to {MAX_STORAGES} objects.")
        storages = [open_handle(handle, device) for handle in body.storages]
        views = _build_views(body, storages)
        self._find_targets(list(views), views)
        self._mapped = MappedMemory(body.epoch, views)

    def write(self, epoch: str, mask: str | None) -> dict[str, Any]:
        """Overwrite the tensors of ``mask`` (all without one), and return the digests of all, in the epoch's order.

        The engine must be paused. When this returns, the copies are complete.
        """
        mapped = self._mapped
        if mapped is None or epoch != mapped.epoch:
            raise SyncError("This server has not mapped that memory of the sender; map it first.")
        if not self._engine.is_paused:
            raise SyncError("Weights are written in place only while generation is paused.")
        self._prepare(mapped, _decode_mask(mask, len(mapped.views)))
        self._digests = None
        digests_N = np.zeros(len(mapped.views), np.uint64)

        def write() -> None:
            with torch.inference_mode():
                for _, batch in self._passes:
                    batch.start()
                for which, batch in self._passes:
                    digests_N[which] = combine_sums_batch(batch.read())

        self._engine.write_weights_in_place(write)
        self._digests = digests_N
        return {"digests": encode_digests(digests_N)}

    def commit(self, promised: str) -> Version:
        """Make what was written the next version, if it has the digests the sender ``promised``."""
        mapped, digests_N = self._mapped, self._digests
        if mapped is None or digests_N is None:
            raise SyncError("There is nothing written to commit.")
        promised_N = decode_digests(promised, len(digests_N))
        wrong = np.flatnonzero(digests_N != promised_N)
        if len(wrong):
            name, first = list(mapped.views)[wrong[0]], wrong[0]
            raise SyncError(f"{name} has digest {digests_N[first]}, and the sender's is {promised_N[first]}.")
        self._digests = None
        before = self._engine.version
        version = Version() if before is None else before.next()
        self._engine.commit_in_place(version)
        if self._prepared_for is not None and self._prepared_for[2] == before:
            self._prepared_for = (*self._prepared_for[:2], version)
        return version

    def unmap(self) -> None:
        """Release the sender's memory."""
        self._passes = []
        self._prepared_for = None
        self._digests = None
        if self._mapped is not None:
            self._mapped = None
            release_ipc()

    def _prepare(self, mapped: MappedMemory, is_written: Array) -> None:
        """Build the checksum batches of this write; the last ones are reused while the engine's tensors stay."""
        key = (mapped.epoch, is_written.tobytes(), self._engine.version)
        if key == self._prepared_for:
            return
        names = list(mapped.views)
        targets = self._find_targets(names, mapped.views)
        written, unchanged = np.flatnonzero(is_written), np.flatnonzero(~is_written)
        self._passes = []
        if len(written):
            sources = [mapped.views[names[i]] for i in written]
            self._passes.append((written, ChecksumBatch(sources, [targets[i] for i in written])))
        if len(unchanged):
            self._passes.append((unchanged, ChecksumBatch([targets[i] for i in unchanged])))
        self._prepared_for = key

    def _find_targets(self, names: Sequence[str], views: Mapping[str, Tensor]) -> list[Tensor]:
        """The slice of the engine's tensors for each name; together they must cover all of them, each once."""
        current = self._engine.weights()
        index = build_index(self._engine.spec, current)
        targets: list[Tensor] = []
        for name in names:
            if name not in index:
                raise SyncError(f"{name} is not a tensor of this model.")
            own_name, piece = index[name]
            target, view = piece.view(current[own_name].detach()), views[name]
            if target.shape != view.shape or target.dtype != view.dtype:
                raise SyncError(
                    f"{name} is {view.dtype} of {tuple(view.shape)}, and here it is {target.dtype} of "
                    f"{tuple(target.shape)}."
                )
            if not target.is_contiguous():
                raise SyncError(f"{name} is not contiguous here.")
            targets.append(target)
        spans = sorted((target.data_ptr(), target.data_ptr() + target.nbytes) for target in targets)
        if any(after[0] < before[1] for before, after in pairwise(spans)):
            raise SyncError("Two of the tensors overlap here.")
        if sum(target.nbytes for target in targets) != sum(tensor.nbytes for tensor in current.values()):
            raise SyncError("The tensors are not all of this model.")
        return targets


def _build_views(body: PublicationBody, storages: Sequence[Tensor]) -> dict[str, Tensor]:
    """The sender's tensors, each within one of its storages."""
    names, dtypes, shapes, offsets = body.names, body.dtypes, body.shapes, body.offsets
    if not len(names) == len(dtypes) == len(shapes) == len(body.lie_in) == len(offsets) == len(set(names)):
        raise SyncError("names (each once), dtypes, shapes, lie_in and offsets must be lists of one length.")
    views: dict[str, Tensor] = {}
    for name, dtype_name, shape, number, start in zip(names, dtypes, shapes, body.lie_in, offsets, strict=True):
        dtype = DTYPES.get(dtype_name)
        if dtype is None or not 0 <= number < len(storages):
            raise SyncError(f"{name} is {dtype_name} of {shape} in storage {number}, which is not possible.")
        stop = start + prod(shape) * dtype.itemsize
        if start < 0 or start % dtype.itemsize or stop > storages[number].numel():
            raise SyncError(f"{name} is not within its storage at {start}.")
        views[name] = storages[number][start:stop].view(dtype).view(tuple(shape))
    return views


def _decode_mask(text: str | None, count: int) -> Array:
    """One bit per tensor in base64, the first in the highest bit of its byte; all tensors without a text."""
    if text is None:
        return np.ones(count, bool)
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"which must be base64: {error}.") from error
    if len(raw) != -(-count // 8):
        raise SyncError(f"which has {len(raw)} bytes, and there are {count} tensors.")
    return np.unpackbits(np.frombuffer(raw, np.uint8), count=count).astype(bool)
