"""The transport ``ipc``: servers of ours on the same device copy weights out of this process's memory.

Two windows, a bucket each: while the servers copy one, the next is gathered into the other. A window is written again
only when every server has said that its copy is done, and its copy is over when it says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from miles.backends.sglang.buckets import Bucket, Named
from miles.backends.sglang.carriers import Carrier, Each
from miles.backends.sglang.client import Client
from miles.backends.sglang.direct import Show
from miles.backends.sglang.lines import Line, Staged
from miles.core.errors import EngineError, SyncError
from miles.kernels.sums import sums_of
from miles.sync.manifest import folded
from miles.sync.window import Window, shown, whereabouts, why_apart

_ALIGNED = 256
Layout = tuple[list[str], list[int]]


def device_of(groups: Sequence[Sequence[Named]]) -> torch.device | None:
    """Where all of them are; None where they are not in one place."""
    devices = {tensor.device for group in groups for _, tensor in group}
    return devices.pop() if len(devices) == 1 else None


async def why_not(
    lines: Sequence[Line], device: torch.device | None, known: MutableMapping[Client, Mapping[str, str]]
) -> str | None:
    """Why some server cannot look into memory of this process; None where all can. ``known``: where clients lead to."""
    if device is None:
        return "the weights are on several devices"
    here = whereabouts(device)
    for line in lines:
        if not isinstance(line, Staged):
            return f"{line.seat.name} is no server of ours"
        try:
            if line.client not in known:
                known[line.client] = await line.where()
        except EngineError as error:
            return f"{line.seat.name} does not say where it is: {error}"
        apart = why_apart(here, known[line.client])
        if apart is not None:
            return f"{line.seat.name} {apart}"
    return None


class ByMemory:
    """A carrier that lets servers copy from memory where they can, and leaves the rest to ``other``.

    Without another way, a server that cannot is refused. ``show``: what servers are told to look into the weights'
    own memory.
    """

    def __init__(
        self,
        other: Carrier | None = None,
        tell: Callable[[str], None] = lambda sentence: None,
        show: Show = shown,
    ) -> None:
        self._other, self._tell, self.show = other, tell, show
        self._told: str | None = None
        self._where: WeakKeyDictionary[Client, Mapping[str, str]] = WeakKeyDictionary()

    async def reaches(self, lines: Sequence[Line], groups: Sequence[Sequence[Named]]) -> bool:
        """Can all of them? Refuses (SyncError) where some cannot and there is no other way."""
        why = await why_not(lines, device_of(groups), self._where)
        if why is None:
            return True
        if self._other is None:
            raise SyncError(f"--update-weight-transport ipc is for servers of ours on the trainer's device, but {why}")
        if why != self._told:
            self._tell(f"Weights go in requests and not through memory: {why}.")
            self._told = why
        return False

    async def begin(self, lines: Sequence[Line], each: Each) -> None:
        await self._way().begin(lines, each)

    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None:
        await self._way().carry(bucket, lines, each)

    async def end(self, lines: Sequence[Line], each: Each) -> None:
        await self._way().end(lines, each)

    async def close(self) -> None:
        if self._other is not None:
            await self._other.close()

    def _way(self) -> Carrier:
        assert self._other is not None
        return self._other


async def send(
    groups: Sequence[Sequence[Named]], lines: list[Line], each: Each, before: Mapping[str, int]
) -> tuple[list[Line], dict[str, int]]:
    """All buckets to all servers: who is left of them, and the digest of every tensor as it was here.

    Tensors whose digest is that of ``before`` are not copied.
    """
    device = device_of(groups)
    assert device is not None
    largest = max(sum(_padded(tensor) for _, tensor in group) for group in groups)
    windows = [Window(largest, device) for _ in range(min(2, len(groups)))]
    digests: dict[str, int] = {}

    def gathering(number: int) -> asyncio.Task[tuple[Layout, dict[str, int]]]:
        return asyncio.create_task(asyncio.to_thread(gathered, groups[number], windows[number % 2].memory))

    coming = gathering(0)
    try:
        lines = await each(lines, lambda line: _staged(line).open([window.told() for window in windows]))
        for number in range(len(groups)):
            layout, found = await coming
            digests |= found
            last = number == len(groups) - 1
            if not last:  # the copy out of that window is over: it was awaited below
                coming = gathering(number + 1)
            layout = _moved(layout, found, before)
            if layout[0] or last:
                lines = await _copied(lines, number % 2, layout, each, last=last)
        return lines, digests
    finally:
        await asyncio.gather(coming, return_exceptions=True)
        for window in windows:
            window.close()


def gathered(group: Sequence[Named], memory: Tensor) -> tuple[Layout, dict[str, int]]:
    """Copy a bucket's tensors into a window, counting them on the way; done when this returns."""
    names, offsets, places, start = [], [], [], 0
    for name, tensor in group:
        names.append(name)
        offsets.append(start)
        places.append(memory[start : start + tensor.nbytes].view(tensor.dtype))
        start += _padded(tensor)
    with torch.no_grad():
        # Reading the sums waits for the device, and with it for the copies.
        sums = sums_of([tensor for _, tensor in group], into=places)
    return (names, offsets), {name: folded(one) for name, one in zip(names, sums, strict=True)}


async def _copied(lines: Sequence[Line], window: int, layout: Layout, each: Each, *, last: bool) -> list[Line]:
    return await each(lines, lambda line: _staged(line).copy(window, *layout, last=last))


def _moved(layout: Layout, digests: Mapping[str, int], before: Mapping[str, int]) -> Layout:
    pairs = [(name, at) for name, at in zip(*layout, strict=True) if digests[name] != before.get(name)]
    return [name for name, _ in pairs], [at for _, at in pairs]


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNED) * _ALIGNED


def _staged(line: Line) -> Staged:
    assert isinstance(line, Staged)
    return line
