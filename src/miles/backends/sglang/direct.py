"""Weights that stay where they are: servers on the same device write them into their own, in one pass, at a word.

Where a trainer's tensors lie whole in memory that it keeps from one publication to the next, servers are told once
where that is (an epoch). From then on a publication is: digests begin to be taken here, servers are held still and
write, what they counted on the way is compared with what was counted here, and with these numbers they commit.
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

from miles.backends.sglang.buckets import dtype_of, hub_named
from miles.backends.sglang.client import Client, Refused
from miles.backends.sglang.lines import KeptOtherwise, Line, Staged
from miles.core.errors import SyncError
from miles.core.types import Array
from miles.kernels.sums import Tally
from miles.models.spec import DecoderSpec
from miles.sync.manifest import folded_all, heard, told
from miles.sync.resident import Resident

Show = Callable[[Tensor], Mapping[str, Any] | None]
"""What another process is told to look into the memory of a tensor; None where it cannot."""

MOSTLY = 0.5
"""Where less than this share of the bytes changed last time, servers are told which did, and write only those."""


class Stale(SyncError):
    """A server does not look into this memory any more."""


@dataclass(frozen=True, slots=True)
class Layout:
    """An epoch: names as servers know them, how many bytes each has, and what they are told of where it lies."""

    epoch: str
    names: tuple[str, ...]
    sizes: Array
    columns: Mapping[str, Any]
    storages: tuple[str, ...]
    """One tensor, by our name, of each memory that is told of."""
    tally: Tally
    device: torch.device


class Direct:
    """The memory of this process's weights. ``tell`` hears why it is not written from, where it could have been."""

    def __init__(self, spec: DecoderSpec, show: Show, tell: Callable[[str], None]) -> None:
        self._spec, self._show, self._tell = spec, show, tell
        self._resident = Resident()
        self._layout: Layout | None = None
        self._unfit = False
        self._told: WeakKeyDictionary[Client, str] = WeakKeyDictionary()
        self._before: Array | None = None
        self._digests: Array | None = None
        self._moved = 1.0
        self._fence: torch.cuda.Event | None = None
        self._early = False
        self.bytes = 0
        """How many bytes each server wrote the last time."""

    # -- what lies where --------------------------------------------------------------------

    def resident(self, tensors: Mapping[str, Tensor]) -> bool:
        """Are these the tensors, in the memory, that were given the last time? They are remembered for the next."""
        if self._resident.same(tensors):
            return True
        self._drop()
        return False

    def forget(self) -> None:
        """Whatever servers were told, they are to be told anew."""
        self._resident.forget()
        self._drop()

    def _drop(self) -> None:
        self._layout, self._unfit, self._before, self._early = None, False, None, False
        self._told.clear()

    async def ready(self, lines: Sequence[Line], tensors: Mapping[str, Tensor], each: Any) -> bool:
        """Can all these servers write from there? Those that were not told where it is are told."""
        if self._layout is None and not self._unfit:
            self._layout = self._laid_out(tensors)
            self._unfit = self._layout is None
        layout = self._layout
        if layout is None:
            return False
        new = [line for line in lines if self._told.get(line.client) != layout.epoch]
        try:
            if new:
                # Each is told of the memory anew, because torch counts who has it.
                await each(new, lambda line: _staged(line).map(self._told_of(layout, tensors)))
                self._told.update({line.client: layout.epoch for line in new})
        except (Refused, SyncError) as error:
            self._unfit, self._layout = True, None
            self._tell(f"Weights go through windows and not in place: {error}.")
            return False
        return True

    def _laid_out(self, tensors: Mapping[str, Tensor]) -> Layout | None:
        named = list(hub_named(self._spec, tensors))
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
        columns = {
            "names": [name for name, _ in named],
            "dtypes": [dtype_of(tensor) for _, tensor in named],
            "shapes": [list(tensor.shape) for _, tensor in named],
            "lie_in": [numbers[start] for start in starts],
            "offsets": [tensor.data_ptr() - start for (_, tensor), start in zip(named, starts, strict=True)],
        }
        sizes = np.array([tensor.nbytes for _, tensor in named], np.int64)
        tally = Tally([tensor for _, tensor in named])
        names = tuple(columns["names"])
        return Layout(secrets.token_hex(8), names, sizes, columns, tuple(storages), tally, devices.pop())

    def _told_of(self, layout: Layout, tensors: Mapping[str, Tensor]) -> bytes:
        shown = [self._show(tensors[name]) for name in layout.storages]
        if any(one is None for one in shown):
            raise SyncError("they lie in memory that no other process can look into")
        return json.dumps({"action": "map", "epoch": layout.epoch, "storages": shown, **layout.columns}).encode()

    # -- a publication ----------------------------------------------------------------------

    def ahead(self, tensors: Mapping[str, Tensor]) -> None:
        """The weights are what is going to be published: where they stay, digests begin to be taken at once."""
        if self._layout is not None and self.resident(tensors) and self._layout is not None:
            self.start()
            self._early = True

    def start(self) -> None:
        """Begin to take the digests of all, as they are when what was asked of the device before is done.

        Where that was begun ``ahead``, nothing is done.
        """
        if self._early:
            return
        layout = self._now()
        self._digests = None
        if layout.device.type == "cuda":
            self._fence = torch.cuda.Event()
            self._fence.record(torch.cuda.current_stream(layout.device))
        layout.tally.start()

    async def write(self, lines: Sequence[Line], each: Any, *, mode: str, spare: bool) -> list[Line]:
        """Have all servers pause and write; those that are left, each proven to hold what is here, none committed.

        With ``spare`` they need not write what has not changed, where that is much.
        """
        layout = self._now()
        marked: Array | None = None
        if spare and self._before is not None and self._moved < MOSTLY:
            marked = await asyncio.to_thread(self.digests) != self._before
        which = None if marked is None else base64.b64encode(np.packbits(marked).tobytes()).decode("ascii")
        fence = self._fence
        if fence is not None and not fence.query():  # servers read what is there, whatever this device still does
            await asyncio.to_thread(fence.synchronize)
        counted: dict[Line, str] = {}

        async def word(line: Line) -> None:
            try:
                counted[line] = await _staged(line).write(layout.epoch, which, mode)
            except Refused as error:
                raise Stale(f"{line.seat.name} does not write in place: {error}") from error

        left = await each(lines, word)
        self.bytes = int(layout.sizes.sum() if marked is None else layout.sizes[marked].sum())
        for line in left:
            self._compare(line, counted[line], layout, marked)
        return left

    def _compare(self, line: Line, text: str, layout: Layout, marked: Array | None) -> None:
        """Refuse (SyncError) a server that counted otherwise; and have it told what it must have."""
        ours_N, theirs_N = self.digests(), heard(text, len(layout.names))
        wrong = np.flatnonzero(ours_N != theirs_N)
        if len(wrong) and self._early:  # weights may have changed since: it is what is published that counts
            self._early = False
            self.start()
            ours_N = self.digests()
            wrong = np.flatnonzero(ours_N != theirs_N)
        if len(wrong):
            at = wrong[0]
            if marked is not None and not marked[at]:
                raise KeptOtherwise(f"{line.seat.name} has another {layout.names[at]} than it was given")
            raise SyncError(
                f"{line.seat.name} wrote {layout.names[at]} in place, which there has digest {theirs_N[at]}, and the "
                f"sender's is {ours_N[at]}"
            )
        _staged(line).promised = told(ours_N)

    def resume(self, lines: Sequence[Line], resumes: bool) -> None:
        """Whether these go on as they commit."""
        for line in lines:
            _staged(line).resumes = resumes

    def digests(self) -> Array:
        """What was started, when it is done."""
        if self._digests is None:
            self._digests = folded_all(self._now().tally.read())
        return self._digests

    def by_name(self) -> dict[str, int]:
        """The same, of which the next publication is told what changed."""
        layout, digests_N = self._now(), self.digests()
        self._early = False
        if self._before is not None:
            self._moved = float(layout.sizes[digests_N != self._before].sum() / max(1, layout.sizes.sum()))
        self._before = digests_N
        return dict(zip(layout.names, digests_N.tolist(), strict=True))

    def _now(self) -> Layout:
        assert self._layout is not None, "ready comes first"
        return self._layout


def _staged(line: Line) -> Staged:
    assert isinstance(line, Staged)
    return line
