"""A publication's way into one server: staged and flipped at once (``miles serve``), or in place (stock SGLang)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.backends.sglang.buckets import Bucket
from miles.backends.sglang.client import Client, Refused
from miles.backends.sglang.fleet import Seat
from miles.backends.sglang.promised import Digests, Shapes
from miles.core.errors import CheckpointError, SyncError
from miles.models.files import stored_tensors

PUBLICATION = "/weights_publication"


class KeptOtherwise(SyncError):
    """A server was to keep what has not changed, and has other bits there than the sender."""


class Line(Protocol):
    """What a server is told in a publication. ``Refused`` says what it does not take; ``Lost`` that it is gone.

    ``still``: the server must hold still from ``begin`` on, because what comes changes it at once. ``torn``: it was
    written over, and can only be put back.
    """

    seat: Seat
    client: Client
    still: bool
    torn: bool

    async def begin(self, shapes: Shapes) -> None: ...
    async def bucket(self, bucket: Bucket) -> None: ...
    async def announce(self, bucket: Bucket, group: str) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def verify(self, digests: Digests) -> str | None:
        """Proof of what has come that must be the same on all servers alike; None where it was held to the digests."""
        ...

    async def commit(self, label: str) -> None: ...
    async def rollback(self) -> None: ...


class Staged:
    """Nothing changes before ``commit``, but what is written in place; digests are the server's own."""

    still = False

    def __init__(self, seat: Seat, client: Client, seconds: float) -> None:
        self.seat, self.client, self._seconds = seat, client, seconds
        self.torn = False
        """Whether what it computes with was written over, and is not committed."""
        self.promised: str | None = None
        """The digests it must find in what it wrote, to commit it."""
        self.resumes = False
        """Whether it goes on when it has committed what it wrote."""

    async def begin(self, shapes: Shapes) -> None:
        await self._tell(shapes.begin)

    async def where(self) -> Mapping[str, str]:
        """Its machine and device."""
        return {name: str(value) for name, value in (await self._say(action="where")).items()}

    async def open(self, windows: Sequence[Mapping[str, Any]]) -> None:
        """Let it look into memory of this process, until the ``last`` copy."""
        await self._say(action="open", windows=list(windows))

    async def copy(self, window: int, names: Sequence[str], offsets: Sequence[int], *, last: bool) -> None:
        """It has copied these out of a window when this returns, and after the ``last`` looks into none."""
        body = {"window": window, "names": list(names), "offsets": list(offsets), "last": last}
        await self._say(action="copy", **body)

    async def map(self, body: bytes) -> None:
        """Let it look into the memory of this process's weights, until it is told of another."""
        await self._tell(body)

    async def write(self, epoch: str, which: str | None, pause: str | None = None) -> str:
        """It is paused, and has written what lies there over what it has when this returns: the digests of all then."""
        self.torn = True
        return str((await self._say(action="write", epoch=epoch, which=which, pause=pause)).get("digests"))

    async def changes(self, body: bytes) -> None:
        """What changed since the version it has."""
        await self.client.ask("POST", f"{PUBLICATION}/changes", data=body, seconds=self._seconds)

    async def bucket(self, bucket: Bucket) -> None:
        await self.client.ask("POST", f"{PUBLICATION}/bucket", data=bucket.as_safetensors, seconds=self._seconds)

    async def announce(self, bucket: Bucket, group: str) -> None:
        body = {**bucket.announced, "group_name": group, "load_format": "flattened_bucket", "staged": True}
        await self.client.ask("POST", "/update_weights_from_distributed", body, seconds=self._seconds)

    async def load(self, folder: Path) -> None:
        await self._say(action="load", folder=str(folder.resolve()))

    async def verify(self, digests: Digests) -> str | None:
        told = await self._tell(digests.verify)
        if (other := told.get("kept_otherwise")) is not None:
            raise KeptOtherwise(f"{self.client.name} has another {other} than it was given")
        if told.get("verified") != len(digests):
            raise Refused(f"{self.client.name} verified {told.get('verified')} of {len(digests)} tensors")
        return None

    async def commit(self, label: str) -> None:
        more = {} if self.promised is None else {"promised": self.promised, "resume": self.resumes}
        await self._say(action="commit", weight_version=label, **more)
        self.torn, self.promised = False, None

    async def rollback(self) -> None:
        self.promised = None
        await self._say(action="rollback")

    async def _say(self, **body: Any) -> Mapping[str, Any]:
        return await self._tell(body)

    async def _tell(self, body: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
        return await self.client.ask("POST", PUBLICATION, body, seconds=self._seconds)


class InPlace:
    """Stock SGLang: tensors are written over as they come, so it is asked only for what it surely has.

    It leaves out names it does not know and ends on wrong shapes, both without a word.
    """

    still = torn = True

    def __init__(self, seat: Seat, client: Client, seconds: float, *, model_path: str, ranks: int) -> None:
        self.seat, self.client, self._seconds = seat, client, seconds
        self._folder, self._ranks = Path(model_path), ranks

    async def begin(self, shapes: Shapes) -> None:
        try:
            stored = stored_tensors(self._folder)
        except CheckpointError:
            return  # the server is elsewhere, or its checkpoint is no plain one: the trainer's own is the same
        if not stored.keys() & shapes.keys():
            raise Refused(f"{self.client.name} serves {self._folder}, which shares no tensor with this model")
        for name, tensor in shapes.items():
            if name in stored and stored[name].shape != tuple(tensor.shape):
                raise Refused(
                    f"{self.client.name} serves {self._folder}, whose {name} has shape {stored[name].shape} and "
                    f"not {tuple(tensor.shape)}"
                )

    async def bucket(self, bucket: Bucket) -> None:
        parts = [bucket.as_pickle] * self._ranks
        body = {"serialized_named_tensors": parts, "load_format": "flattened_bucket", "flush_cache": False}
        await self.client.ask("POST", "/update_weights_from_tensor", body, seconds=self._seconds)

    async def announce(self, bucket: Bucket, group: str) -> None:
        body = {**bucket.announced, "group_name": group, "load_format": "flattened_bucket", "flush_cache": False}
        await self.client.ask("POST", "/update_weights_from_distributed", body, seconds=self._seconds)

    async def load(self, folder: Path) -> None:
        body = {"model_path": str(folder.resolve()), "flush_cache": False}
        await self.client.ask("POST", "/update_weights_from_disk", body, seconds=self._seconds)

    async def verify(self, digests: Digests) -> str | None:
        """Its own checksum of all it holds, where it has one: on CUDA."""
        if not self.client.sums:
            return None
        try:
            told = await self.client.ask("POST", "/weights_checker", {"action": "checksum"}, seconds=self._seconds)
        except Refused:
            self.client.sums = False
            return None
        found = told.get("per_engine_checksum") if isinstance(told, dict) else None
        return None if found is None else str(found)

    async def commit(self, label: str) -> None:
        if not await self.client.flush():
            raise Refused(f"{self.client.name} still has requests in its cache")
        body = {"new_version": label, "abort_all_requests": False}
        await self.client.ask("POST", "/update_weight_version", body, seconds=self._seconds)

    async def rollback(self) -> None:
        """What was written over is brought back by whoever has it."""


async def line_to(seat: Seat, client: Client, seconds: float) -> Line:
    """How weights get into this server."""
    facts = await client.look()
    if facts.kind == "miles":
        return Staged(seat, client, seconds)
    return InPlace(seat, client, seconds, model_path=facts.model_path, ranks=facts.ranks)


def what_was_verified(line: Line, proof: str | None, count: int) -> str:
    """A sentence on what a server proves."""
    if not line.still:
        return f"{line.seat.name} proves the digest of each of {count} tensors before it takes new weights."
    if proof is not None:
        return f"{line.seat.name} takes weights in place; its checksum of them must be that of the others."
    return (
        f"{line.seat.name} takes weights in place and has no digests: names and shapes of {count} tensors are "
        "checked before they are sent, and that it took each bucket after."
    )


def alike(proofs: Sequence[tuple[Line, str | None]]) -> None:
    """Refuse (SyncError) servers whose own checksums of the same weights differ."""
    told = [(line, proof) for line, proof in proofs if proof is not None]
    for line, proof in told[1:]:
        if proof != told[0][1]:
            raise SyncError(
                f"{line.seat.name} has other weights than {told[0][0].seat.name}: their own checksums of them differ"
            )
