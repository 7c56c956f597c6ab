"""The transport of adapters: servers of ours are sent the factors, and add them to the base they have.

What they come to is held against the digests of the trainer's own merged matrices, as after any other transport. A
server that has another base, or is not of ours, is sent the matrices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch

from miles.backends.sglang.buckets import Bucket, Named
from miles.backends.sglang.carriers import Each, InRequests
from miles.backends.sglang.client import Refused
from miles.backends.sglang.deltas import Delta
from miles.backends.sglang.fleet import Seat
from miles.backends.sglang.kept import known
from miles.backends.sglang.lines import PUBLICATION, Line, Staged
from miles.backends.sglang.mapped import ByMemory
from miles.backends.sglang.mapped import send as by_memory
from miles.models import hub, names
from miles.models.lora import Adapters
from miles.models.lora_targets import Lora
from miles.models.spec import DecoderSpec
from miles.sync.adapters import Parcel, packed
from miles.sync.manifest import digests

# How often what servers make of adapters may be another than what the trainer has, until they are sent none.
_MOST = 2


class OfAdapters(Delta):
    """A carrier. ``adapters`` gives the factors as they are now, ``base`` the digests of all they are added to.

    ``sent`` counts the bytes that a server that takes adapters was sent of them, since the start.
    """

    def __init__(
        self,
        adapters: Callable[[], Adapters],
        base: Callable[[], Mapping[str, int]],
        *,
        seconds: float,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__()
        self._adapters, self._digests, self._seconds, self._tell = adapters, base, seconds, tell
        self._memory = ByMemory(InRequests(), tell)
        self._known: Mapping[str, int] | None = None
        self._unable: set[Seat] = set()
        self._failures = 0
        self._used = False

    def again(self) -> bool:
        """A publication failed: is it worth another try, in which everyone is sent matrices?"""
        if self._used:
            self._failures += 1
            self._whole = True
            if self._failures == _MOST:
                self._tell("adapters were not taken as they were sent; from now on matrices are sent with them in.")
        return self._used

    async def send(
        self, groups: Sequence[Sequence[Named]], lines: list[Line], each: Each, before: Mapping[str, int]
    ) -> tuple[list[Line], dict[str, int], int]:
        """All that is not as ``before``, to all: who is left, the digest of every tensor, the bytes that went out."""
        self._used, plain = False, self._whole or self._failures >= _MOST or not before
        self._whole = False
        if not before and await self._memory.reaches(lines, groups):
            lines, found = await by_memory(groups, lines, each, before)
            return lines, found, sum(tensor.nbytes for group in groups for _, tensor in group)
        found: dict[str, int] = {}
        size = 0
        for group in groups:
            here = await asyncio.to_thread(digests, {name: tensor.detach() for name, tensor in group})
            found |= here
            moved = [(name, tensor) for name, tensor in group if here[name] != before.get(name)]
            if moved:
                body = b"" if plain else await asyncio.to_thread(self._body, [name for name, _ in moved])
                size += len(body) or sum(tensor.nbytes for _, tensor in moved)
                lines = await each(lines, self._teller(body, moved, here))
        return lines, found, size

    def _teller(
        self, body: bytes, moved: Sequence[Named], numbers: Mapping[str, int]
    ) -> Callable[[Line], Awaitable[None]]:
        """What each server is told of some tensors; those are brought to the host once, if at all."""
        made: list[asyncio.Task[Bucket]] = []

        async def tell(line: Line) -> None:
            if body and line.seat not in self._unable and isinstance(line, Staged):
                try:
                    await line.client.ask("POST", f"{PUBLICATION}/adapters", data=body, seconds=self._seconds)
                    self._used, self.sent = True, self.sent + len(body)
                    return
                except Refused as error:
                    self._unable.add(line.seat)
                    self._tell(f"{line.seat.name} takes no adapters ({error}); it is sent the matrices they are in.")
            if not made:
                made.append(asyncio.create_task(asyncio.to_thread(_bucket, moved, numbers)))
            await line.bucket(await made[0])

        return tell

    def _body(self, wanted: Collection[str]) -> bytes:
        """The factors of these matrices; nothing where some are no matrix of an adapter's."""
        if self._known is None:
            self._known = self._digests()
        base = self._known
        if not all(name in base for name in wanted):
            return b""
        adapters = self._adapters()
        targets = {f"{target.module}.weight": target for target in adapters.lora.targets}
        return packed(
            Parcel(
                scale=adapters.lora.scale,
                base={name: base[name] for name in wanted},
                factors={name: adapters.factors(targets[name]) for name in wanted if name in targets},
            )
        )


def _bucket(moved: Sequence[Named], numbers: Mapping[str, int]) -> Bucket:
    with torch.no_grad():
        return known({name: tensor.detach().cpu().contiguous() for name, tensor in moved}, numbers)


def base_digests(folder: Path, spec: DecoderSpec, lora: Lora, dtype: torch.dtype) -> dict[str, int]:
    """Of the checkpoint's matrices that adapters are added to, by its own names; read one of ours at a time."""
    wanted, pieces = {target.ours for target in lora.targets}, names.pieces(spec)
    found: dict[str, int] = {}
    for ours, tensor in hub.load_slices(folder, rank=0, world=1, device="cpu", dtype=dtype):
        if ours in wanted:
            found |= digests({piece.hf_name: piece.of(tensor).contiguous() for piece in pieces[ours]})
    return found
