"""In-place weight updates by CUDA IPC: servers on the same device map the trainer's weights and copy them.

If a trainer's tensors stay in the same memory from one update to the next, servers map it once (an epoch). From then on
an update is: digests are computed here, servers pause and copy, the digests they computed on the way are compared with
those computed here, and servers commit with these digests.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from miles.backends.remote.client import RequestRejected, SglangClient
from miles.backends.remote.transports.buckets import dtype_name, iter_hf_named
from miles.backends.remote.update_protocols import (
    ForEachServer,
    UnchangedWeightMismatch,
    UpdateProtocol,
    require_staged,
)
from miles.core.errors import SyncError
from miles.core.types import Array
from miles.kernels.runtime.checksum import ChecksumBatch
from miles.models.spec import DecoderSpec
from miles.sync.digest_cache import StorageTracker
from miles.sync.manifest import combine_sums_batch, decode_digests, encode_digests

ExportMemory = Callable[[Tensor], Mapping[str, Any] | None]
"""Makes the handle by which another process maps the memory of a tensor; None if it cannot be mapped."""

SPARSE_WRITE_FRACTION = 0.5
"""If less than this fraction of the bytes changed in the last update, servers copy only the changed tensors."""


class StaleMapping(SyncError):
    """A server has not mapped the current memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedWeights:
    """An epoch: the checkpoint names and sizes of the tensors, and the columns that describe where each lies."""

    epoch: str
    names: tuple[str, ...]
    sizes: Array
    columns: Mapping[str, Any]
    storages: tuple[str, ...]
    """One parameter name of each storage that is mapped."""
    checksums: ChecksumBatch
    device: torch.device


class InPlaceIpcWriter:
    """Maps the memory of this process's weights into servers. ``log`` is called with why that is impossible."""

    def __init__(self, spec: DecoderSpec, export: ExportMemory, log: Callable[[str], None]) -> None:
        self._spec = spec
        self._export = export
        self._log = log
        self._tracker = StorageTracker()
        self._mapped: MappedWeights | None = None
        self._unmappable = False
        self._epochs: WeakKeyDictionary[SglangClient, str] = WeakKeyDictionary()
        self._last_digests: Array | None = None
        self._digests: Array | None = None
        self._changed_fraction = 1.0
        self._fence: torch.cuda.Event | None = None
        self._started_early = False
        self.bytes = 0
        """How many bytes each server copied in the last update."""

    # -- the mapping ------------------------------------------------------------------------

    def is_resident(self, tensors: Mapping[str, Tensor]) -> bool:
        """Are these the tensors of the last call, in the same memory? They are remembered for the next call."""
        if self._tracker.same(tensors):
            return True
        self._reset()
        return False

    def forget(self) -> None:
        """Have all servers map the memory again."""
        self._tracker.forget()
        self._reset()

    def _reset(self) -> None:
        self._mapped = None
        self._unmappable = False
        self._last_digests = None
        self._started_early = False
        self._epochs.clear()

    async def prepare(
        self, updates: Sequence[UpdateProtocol], tensors: Mapping[str, Tensor], for_each: ForEachServer
    ) -> bool:
        """Can all these servers copy from the memory? Those that have not mapped it do so."""
        if self._mapped is None and not self._unmappable:
            self._mapped = self._describe(tensors)
            self._unmappable = self._mapped is None
        mapped = self._mapped
        if mapped is None:
            return False
        new = [update for update in updates if self._epochs.get(update.client) != mapped.epoch]
        try:
            if new:
                # A handle per server, because torch counts how many processes use one.
                await for_each(new, lambda update: require_staged(update).map_memory(self._map_body(mapped, tensors)))
                self._epochs.update({update.client: mapped.epoch for update in new})
        except (RequestRejected, SyncError) as error:
            self._unmappable, self._mapped = True, None
            self._log(f"Weights are sent through windows instead of in place: {error}.")
            return False
        return True

    def _describe(self, tensors: Mapping[str, Tensor]) -> MappedWeights | None:
        named = list(iter_hf_named(self._spec, tensors))
        devices = {tensor.device for _, tensor in named}
        if len(devices) != 1 or not all(tensor.is_contiguous() for _, tensor in named):
            return None
        numbers: dict[int, int] = {}
        storages: list[str] = []
        for name, tensor in tensors.items():
            start = tensor.untyped_storage().data_ptr()
            if start not in numbers:
                numbers[start] = len(storages)
                storages.append(name)
        starts = [tensor.untyped_storage().data_ptr() for _, tensor in named]
        names = [name for name, _ in named]
        columns = {
            "names": names,
            "dtypes": [dtype_name(tensor) for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "lie_in": [numbers[start] for start in starts],
            "offsets": [tensor.data_ptr() - start for (_, tensor), start in zip(named, starts, strict=True)],
        }
        return MappedWeights(
            epoch=secrets.token_hex(8),
            names=tuple(names),
            sizes=np.array([tensor.nbytes for _, tensor in named], np.int64),
            columns=columns,
            storages=tuple(storages),
            checksums=ChecksumBatch([tensor for _, tensor in named]),
            device=devices.pop(),
        )

    def _map_body(self, mapped: MappedWeights, tensors: Mapping[str, Tensor]) -> bytes:
        handles = [self._export(tensors[name]) for name in mapped.storages]
        if any(handle is None for handle in handles):
            raise SyncError("the weights are in memory that another process cannot map")
        return json.dumps({"action": "map", "epoch": mapped.epoch, "storages": handles, **mapped.columns}).encode()

    # -- an update --------------------------------------------------------------------------

    def start_early(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to compute the digests ahead of the update, if the weights are mapped and still in the same memory."""
        if self._mapped is not None and self.is_resident(tensors) and self._mapped is not None:
            self.start()
            self._started_early = True

    def start(self) -> None:
        """Start to compute the digests, after the work queued on the device; nothing if ``start_early`` did."""
        if self._started_early:
            return
        mapped = self._current()
        self._digests = None
        if mapped.device.type == "cuda":
            self._fence = torch.cuda.Event()
            self._fence.record(torch.cuda.current_stream(mapped.device))
        mapped.checksums.start()

    async def write(
        self, updates: Sequence[UpdateProtocol], for_each: ForEachServer, *, mode: str, skip_unchanged: bool
    ) -> list[UpdateProtocol]:
        """Have all servers pause and copy; returns the servers left, each verified, none committed.

        With ``skip_unchanged`` they copy only the changed tensors, if most are unchanged.
        """
        mapped = self._current()
        selected: Array | None = None
        if skip_unchanged and self._last_digests is not None and self._changed_fraction < SPARSE_WRITE_FRACTION:
            selected = await asyncio.to_thread(self.digests) != self._last_digests
        which = None if selected is None else base64.b64encode(np.packbits(selected).tobytes()).decode("ascii")
        fence = self._fence
        if fence is not None and not fence.query():  # servers read the memory whatever this device still computes
            await asyncio.to_thread(fence.synchronize)
        reported: dict[UpdateProtocol, str] = {}

        async def write_one(update: UpdateProtocol) -> None:
            try:
                reported[update] = await require_staged(update).write_in_place(mapped.epoch, which, mode)
            except RequestRejected as error:
                raise StaleMapping(f"{update.slot.name} does not write in place: {error}") from error

        remaining = await for_each(updates, write_one)
        self.bytes = int(mapped.sizes.sum() if selected is None else mapped.sizes[selected].sum())
        for update in remaining:
            self._compare(update, reported[update], mapped, selected)
        return remaining

    def _compare(self, update: UpdateProtocol, text: str, mapped: MappedWeights, selected: Array | None) -> None:
        """Raise ``SyncError`` if a server computed other digests; else have it commit with them."""
        ours_N, theirs_N = self.digests(), decode_digests(text, len(mapped.names))
        wrong = np.flatnonzero(ours_N != theirs_N)
        if len(wrong) and self._started_early:  # the weights may have changed since: compute the digests again
            self._started_early = False
            self.start()
            ours_N = self.digests()
            wrong = np.flatnonzero(ours_N != theirs_N)
        if len(wrong):
            at = wrong[0]
            if selected is not None and not selected[at]:
                raise UnchangedWeightMismatch(f"{update.slot.name} has another {mapped.names[at]} than it was sent")
            raise SyncError(
                f"{update.slot.name} wrote {mapped.names[at]} in place with digest {theirs_N[at]}, but the sender's "
                f"is {ours_N[at]}"
            )
        require_staged(update).expected_digests = encode_digests(ours_N)

    def set_resume_on_commit(self, updates: Sequence[UpdateProtocol], resume: bool) -> None:
        for update in updates:
            require_staged(update).resume_on_commit = resume

    def digests(self) -> Array:
        """The digests that were started, when they are computed."""
        if self._digests is None:
            self._digests = combine_sums_batch(self._current().checksums.read())
        return self._digests

    def digests_by_name(self) -> dict[str, int]:
        """The digests of a committed update, against which the next one is compared."""
        mapped, digests_N = self._current(), self.digests()
        self._started_early = False
        if self._last_digests is not None:
            changed = mapped.sizes[digests_N != self._last_digests].sum()
            self._changed_fraction = float(changed / max(1, mapped.sizes.sum()))
        self._last_digests = digests_N
        return dict(zip(mapped.names, digests_N.tolist(), strict=True))

    def _current(self) -> MappedWeights:
        assert self._mapped is not None, "prepare comes first"
        return self._mapped
