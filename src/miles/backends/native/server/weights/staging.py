"""Two-phase weight publication over HTTP: a manifest, tensors in buckets, digests; nothing changes before the commit.

Names, shapes and digests are those of Hugging Face tensors, as the sender has them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.server.admin_bodies import ManifestEntryBody, PublicationBody
from miles.backends.native.server.weights.ipc_inplace import InplaceWriter
from miles.backends.native.server.weights.ipc_receiver import IpcReceiver, ReceivedWeights
from miles.backends.native.server.weights.update import (
    DTYPES,
    build_spec_index,
    get_tensor,
    get_tensors,
    load_safetensors,
)
from miles.core.errors import SyncError
from miles.models.checkpoint import param_map
from miles.models.draft.spec import DRAFT_PREFIX
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.sync.delta import apply_delta
from miles.sync.manifest import ManifestEntry, combine_sums, compute_digests

# Bytes of the JSON header of a safetensors file: for each tensor, and for the rest.
_MAX_ENTRY_HEADER = 1024
_MAX_FILE_HEADER = 1 << 20


class WeightStaging:
    """The tensors received of one publication. The engine keeps its weights until ``take_verified`` and a commit."""

    def __init__(self, engine: NativeEngine, num_ranks: int = 1) -> None:
        self._engine = engine
        self.receiver = IpcReceiver(engine, num_ranks)
        self.writer = InplaceWriter(engine, num_ranks)
        self._placed: set[str] = set()
        self._unchanged: set[str] = set()
        self._entries: dict[str, ManifestEntry] | None = None
        self._keeps_unchanged = False
        self._tensors: dict[str, Tensor] = {}
        self._verified = False

    def run_step(self, body: PublicationBody, max_bytes: int) -> dict[str, Any]:
        """Any action but the commit; returns what the response contains besides the success.

        Files of more than ``max_bytes`` together are not read.
        """
        match body.action:
            case "where":
                return self.receiver.describe_location()
            case "begin":
                self.begin(_parse_entries(body.entries), whole=body.whole, keeps_unchanged=body.keeps)
            case "load":
                self.load(Path(body.folder), max_bytes)
            case "open":
                self.receiver.open(body.windows)
            case "copy":
                self.copy(body)
                if body.last:
                    self.receiver.close()
            case "map" | "write":
                return self.writer.run_step(body)
            case "verify":
                digests = {name: int(digest) for name, digest in body.digests.items()}
                if (differing := self.keep_unchanged(digests)) is not None:
                    return {"kept_otherwise": differing}
                return {"verified": self.verify(digests)}
            case _:
                self.rollback()
        return {}

    def begin(self, entries: Sequence[ManifestEntry], *, whole: bool, keeps_unchanged: bool = False) -> None:
        """Refuse names and shapes that are not this model's, and missing tensors of a ``whole`` publication.

        ``keeps_unchanged``: of the announced tensors only those that changed are sent, and the others stay.
        """
        self.rollback()
        shapes, optional = self._get_expected()
        announced = {entry.name: entry for entry in entries}
        for name, entry in announced.items():
            if name not in shapes:
                if self._is_ignorable(name):
                    continue
                raise SyncError(f"{name} is not a tensor of this model.")
            if entry.shape != shapes[name]:
                raise SyncError(f"{name} has shape {entry.shape}, but this model's has {shapes[name]}.")
        missing = [name for name in shapes if name not in announced and name not in optional] if whole else []
        if missing:
            more = f", and {len(missing) - 1} others" if missing[1:] else ""
            raise SyncError(f"{missing[0]} is missing{more}.")
        self._entries = announced
        self._keeps_unchanged = keeps_unchanged

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Stage tensors for the commit; refuse any that the manifest does not announce so."""
        entries = self._get_entries()
        for name, tensor in tensors.items():
            entry = entries.get(name)
            if entry is None:
                raise SyncError(f"{name} is not in the manifest.")
            if name in self._tensors:
                raise SyncError(f"{name} was sent twice.")
            shape, dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
            if (shape, dtype) != (entry.shape, entry.dtype):
                raise SyncError(
                    f"{name} is {dtype} of shape {shape}, but the manifest has {entry.dtype} of {entry.shape}."
                )
            self._tensors[name] = tensor
            self._verified = False

    def copy(self, body: PublicationBody) -> None:
        """Copy the tensors in a window of the sender; when this returns, the sender may overwrite the window."""
        entries = self._get_entries()
        views = self.receiver.build_views(body, entries)
        duplicate = next((name for name in views if name in self._tensors), None)
        if duplicate is not None:
            raise SyncError(f"{duplicate} was sent twice.")
        if not self.receiver.can_place(entries):
            self.add_tensors({name: view.clone() for name, view in views.items()})
            return
        self._tensors |= self.receiver.place(views, entries)
        self._placed |= views.keys()
        self._verified = False

    def add_delta(self, content: bytes, label: str, max_bytes: int) -> None:
        """Stage what changed since the current version, which has this ``label``."""
        current = self._engine.weights()

        def get_current(name: str) -> Tensor:
            tensor = get_tensor(self._engine.spec, current, name)
            if tensor is None:
                raise SyncError(f"{name} is not a tensor of this model.")
            return tensor

        self.add_tensors(apply_delta(content, label, get_current, max_bytes))

    def load(self, folder: Path, max_bytes: int) -> None:
        """Stage the safetensors files of a folder; refuse what is larger than the manifest announces."""
        entries = self._get_entries()
        announced = sum(prod(entry.shape) * _get_itemsize(entry) + _MAX_ENTRY_HEADER for entry in entries.values())
        left = min(max_bytes, announced + _MAX_FILE_HEADER)
        try:
            files = sorted(folder.glob("*.safetensors"))
            if not files:
                raise SyncError(f"{folder} has no safetensors file that this server can see.")
            for file in files:
                content = _read_regular_file(file, left)
                left -= len(content)
                self.add_tensors(load_safetensors(content))
        except OSError as error:
            raise SyncError(f"{folder} cannot be read: {error.strerror or error}.") from error

    def keep_unchanged(self, digests: Mapping[str, int]) -> str | None:
        """Stage the engine's own tensors for those that were not sent; returns the name of one that differs."""
        entries = self._get_entries()
        names = [name for name in entries if name not in self._tensors] if self._keeps_unchanged else []
        if not names:
            return None
        own = get_tensors(self._engine.spec, self._engine.weights(), names)
        own_digests = compute_digests(own)
        for name in names:
            if own_digests.get(name) != digests.get(name):
                return name
        self.receiver.fill(own)
        self._tensors |= own
        self._unchanged |= own.keys()
        return None

    def verify(self, digests: Mapping[str, int]) -> int:
        """Refuse unless all tensors arrived with the sender's digests; returns the number of tensors."""
        entries = self._get_entries()
        for name in entries:
            if name not in self._tensors:
                raise SyncError(f"{name} was not sent.")
        # Of a partial publication, the tensors that stay must be what the sender has, too.
        missing = [name for name in digests if name not in entries]
        rest = get_tensors(self._engine.spec, self._engine.weights(), missing) if missing else {}
        known = {name: combine_sums(checksum) for name, checksum in self.receiver.checksums.items()}
        unread = {n: tensor for n, tensor in self._tensors.items() if n not in known and n not in self._unchanged}
        for name, digest in {**known, **compute_digests({**unread, **rest})}.items():
            if digest != digests.get(name):
                raise SyncError(f"{name} has digest {digest}, and the sender's is {digests.get(name)}.")
        self._verified = True
        return len(self._tensors) + len(rest)

    def take_verified(self) -> tuple[dict[str, Tensor], ReceivedWeights]:
        """All verified tensors, those that are in place already apart; nothing is kept here."""
        if not self._verified:
            raise SyncError("There is nothing verified to commit.")
        in_place = self._placed | self._unchanged
        tensors = {name: tensor for name, tensor in self._tensors.items() if name not in in_place}
        received = self.receiver.take()
        self.rollback()
        return tensors, received

    def rollback(self) -> None:
        """Drop what was received."""
        self._entries = None
        self._keeps_unchanged = False
        self._tensors = {}
        self._verified = False
        self._placed = set()
        self._unchanged = set()
        self.receiver.reset()

    def _get_entries(self) -> dict[str, ManifestEntry]:
        if self._entries is None:
            raise SyncError("No publication was begun; begin one first.")
        return self._entries

    def _get_expected(self) -> tuple[dict[str, tuple[int, ...]], frozenset[str]]:
        """The shape of every tensor, and the names that may be missing: aliases of others, and a draft head's."""
        spec = self._engine.spec
        if isinstance(spec, HfAdapterSpec):
            return {name: tuple(tensor.shape) for name, tensor in self._engine.weights().items()}, frozenset()
        shapes = {name: piece.shape for name, (_, piece) in build_spec_index(spec).items()}
        head = self._engine.draft_head
        drafts = {} if head is None else {DRAFT_PREFIX + name: tuple(p.shape) for name, p in head.named_parameters()}
        return shapes | drafts, frozenset([*param_map.stacked_expert_names(spec).values(), *drafts])

    def _is_ignorable(self, name: str) -> bool:
        spec = self._engine.spec
        return not isinstance(spec, HfAdapterSpec) and param_map.is_ignorable(spec, name)


def _get_itemsize(entry: ManifestEntry) -> int:
    dtype = DTYPES.get(entry.dtype)
    if dtype is None:
        raise SyncError(f"{entry.name} has dtype {entry.dtype!r}, but weights are floating-point numbers.")
    return dtype.itemsize


def _read_regular_file(path: Path, max_bytes: int) -> bytes:
    """The content of a file, or of the file a link names; a device or a pipe is not opened for reading."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would wait for its writer
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise SyncError(f"{path} is not a regular file.")
        if status.st_size > max_bytes:
            raise SyncError(f"{path} has {status.st_size} bytes, more than the manifest leaves for it ({max_bytes}).")
        return file.read(status.st_size)


def _parse_entries(entries: Sequence[ManifestEntryBody]) -> list[ManifestEntry]:
    """The manifest of a body; digests are sent with ``verify``."""
    if len({entry.name for entry in entries}) != len(entries):
        raise SyncError("entries must be a list of tensors with different names.")
    return [
        ManifestEntry(name=entry.name, shape=tuple(entry.shape), dtype=entry.dtype.removeprefix("torch."), digest=0)
        for entry in entries
    ]
