"""The transport ``ipc``: ``miles serve`` servers on the same device copy weights out of this process (CUDA IPC).

Two shared windows of a bucket each: while the servers copy one, the next bucket is gathered into the other. A window is
written again only after every server has reported that its copy is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from miles.backends.remote.client import SglangClient
from miles.backends.remote.transports.buckets import Bucket, Named
from miles.backends.remote.transports.ipc_inplace import ExportMemory
from miles.backends.remote.transports.senders import WeightTransport
from miles.backends.remote.update_protocols import ForEachServer, StagedUpdate, UpdateProtocol, require_staged
from miles.core.errors import EngineError, SyncError
from miles.kernels.runtime.checksum import compute_checksums
from miles.sync.manifest import combine_sums
from miles.sync.shared_memory import SharedBuffer, describe_location, explain_unreachable, export_handle

_ALIGNMENT = 256
WindowLayout = tuple[list[str], list[int]]


def common_device(groups: Sequence[Sequence[Named]]) -> torch.device | None:
    """The device of all tensors; None if they are on several."""
    devices = {tensor.device for group in groups for _, tensor in group}
    return devices.pop() if len(devices) == 1 else None


async def find_ipc_obstacle(
    updates: Sequence[UpdateProtocol],
    device: torch.device | None,
    locations: MutableMapping[SglangClient, Mapping[str, str]],
) -> str | None:
    """Why some server cannot map memory of this process; None if all can. ``locations`` caches where servers run."""
    if device is None:
        return "the weights are on several devices"
    here = describe_location(device)
    for update in updates:
        if not isinstance(update, StagedUpdate):
            return f"{update.slot.name} is not a miles serve server"
        try:
            if update.client not in locations:
                locations[update.client] = await update.fetch_location()
        except EngineError as error:
            return f"{update.slot.name} does not report its location: {error}"
        unreachable = explain_unreachable(here, locations[update.client])
        if unreachable is not None:
            return f"{update.slot.name} {unreachable}"
    return None


class IpcTransport(WeightTransport):
    """A transport by shared memory if all servers can map it, and by ``fallback`` otherwise.

    Without a fallback, a server that cannot is an error. ``export`` makes the handle by which servers map the memory of
    a weight.
    """

    def __init__(
        self,
        fallback: WeightTransport | None = None,
        log: Callable[[str], None] = lambda sentence: None,
        export: ExportMemory = export_handle,
    ) -> None:
        self._fallback = fallback
        self._log = log
        self.export = export
        self._logged: str | None = None
        self._locations: WeakKeyDictionary[SglangClient, Mapping[str, str]] = WeakKeyDictionary()

    async def reaches(self, updates: Sequence[UpdateProtocol], groups: Sequence[Sequence[Named]]) -> bool:
        """Can all servers map the memory? Raises ``SyncError`` if not and there is no fallback."""
        why = await find_ipc_obstacle(updates, common_device(groups), self._locations)
        if why is None:
            return True
        if self._fallback is None:
            raise SyncError(f"--update-weight-transport ipc needs miles serve on the trainer's device, but {why}")
        if why != self._logged:
            self._log(f"Weights are sent in HTTP requests instead of shared memory: {why}.")
            self._logged = why
        return False

    async def begin(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        assert self._fallback is not None
        await self._fallback.begin(updates, for_each)

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        assert self._fallback is not None
        await self._fallback.send_bucket(bucket, updates, for_each)

    async def finish(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        assert self._fallback is not None
        await self._fallback.finish(updates, for_each)

    async def close(self) -> None:
        if self._fallback is not None:
            await self._fallback.close()


async def send_through_windows(
    groups: Sequence[Sequence[Named]], updates: list[UpdateProtocol], for_each: ForEachServer, before: Mapping[str, int]
) -> tuple[list[UpdateProtocol], dict[str, int]]:
    """Have all servers copy all buckets; returns the servers that are left, and the digest of every tensor.

    Tensors with the same digest as ``before`` are not copied.
    """
    device = common_device(groups)
    assert device is not None
    largest = max(sum(_aligned_bytes(tensor) for _, tensor in group) for group in groups)
    windows = [SharedBuffer(largest, device) for _ in range(min(2, len(groups)))]
    digests: dict[str, int] = {}

    def start_gathering(number: int) -> asyncio.Task[tuple[WindowLayout, dict[str, int]]]:
        return asyncio.create_task(asyncio.to_thread(gather_into_window, groups[number], windows[number % 2].memory))

    gathering = start_gathering(0)
    try:
        # A handle per server, because torch counts how many processes use one.
        updates = await for_each(
            updates, lambda update: require_staged(update).open_windows([window.export_handle() for window in windows])
        )
        for number in range(len(groups)):
            layout, bucket_digests = await gathering
            digests |= bucket_digests
            last = number == len(groups) - 1
            if not last:  # the copy out of that window is complete: it was awaited below
                gathering = start_gathering(number + 1)
            names, offsets = _select_changed(layout, bucket_digests, before)
            if names or last:
                copy = partial(_copy_window, window=number % 2, names=names, offsets=offsets, last=last)
                updates = await for_each(updates, copy)
        return updates, digests
    finally:
        await asyncio.gather(gathering, return_exceptions=True)
        for window in windows:
            window.close()


async def _copy_window(
    update: UpdateProtocol, *, window: int, names: Sequence[str], offsets: Sequence[int], last: bool
) -> None:
    await require_staged(update).copy_window(window, names, offsets, last=last)


def gather_into_window(group: Sequence[Named], memory: Tensor) -> tuple[WindowLayout, dict[str, int]]:
    """Copy the tensors of a bucket into a window and compute their digests; complete when this returns."""
    names: list[str] = []
    offsets: list[int] = []
    targets: list[Tensor] = []
    start = 0
    for name, tensor in group:
        names.append(name)
        offsets.append(start)
        targets.append(memory[start : start + tensor.nbytes].view(tensor.dtype))
        start += _aligned_bytes(tensor)
    with torch.no_grad():
        # Reading the sums waits for the device, and with it for the copies.
        sums = compute_checksums([tensor for _, tensor in group], into=targets)
    return (names, offsets), {name: combine_sums(parts) for name, parts in zip(names, sums, strict=True)}


def _select_changed(layout: WindowLayout, digests: Mapping[str, int], before: Mapping[str, int]) -> WindowLayout:
    changed = [(name, at) for name, at in zip(*layout, strict=True) if digests[name] != before.get(name)]
    return [name for name, _ in changed], [at for _, at in changed]


def _aligned_bytes(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
