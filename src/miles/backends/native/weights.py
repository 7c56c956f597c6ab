"""Take a publication of weights: stage it, check it against the model and its digests, flip at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.manifest import Entry, Manifest, digest

Adopt = Callable[[Mapping[str, Tensor], Version], None]


class Weights:
    """The staging area of one engine. Whatever fails, the engine goes on with the version it has."""

    def __init__(self, name: str, expected: Mapping[str, Tensor], device: torch.device, adopt: Adopt) -> None:
        self._name = name
        self._expected = {key: (tuple(tensor.shape), str(tensor.dtype)) for key, tensor in expected.items()}
        self._device = device
        self._adopt = adopt
        self._manifest: Manifest | None = None
        self._entries: dict[str, Entry] = {}
        self._staged: dict[str, Tensor] = {}
        self._verified = False

    def begin(self, manifest: Manifest) -> None:
        """Refuse a publication that is not exactly this model's tensors."""
        self.rollback()
        entries = {entry.name: entry for entry in manifest.entries}
        for name in self._expected:
            if name not in entries:
                raise self._refusal(name, "is missing from the manifest", manifest.version)
        for name, entry in entries.items():
            if name not in self._expected:
                raise self._refusal(name, "is not a tensor of this model", manifest.version)
            self._compare(name, entry.shape, entry.dtype, manifest.version)
        self._manifest, self._entries = manifest, entries

    def receive(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor for the flip."""
        version = self._begun().version
        if name not in self._entries:
            raise self._refusal(name, "is not a tensor of this model", version)
        if name in self._staged:
            raise self._refusal(name, "came twice", version)
        self._compare(name, tuple(tensor.shape), str(tensor.dtype), version)
        self._staged[name] = self._stage(name, tensor.detach())
        self._verified = False

    def verify(self) -> None:
        """Refuse unless every tensor came and has the bits the manifest says."""
        version = self._begun().version
        for name, entry in self._entries.items():
            if name not in self._staged:
                raise self._refusal(name, "did not come", version)
            found = self._digest(name)
            if found != entry.digest:
                raise self._refusal(name, f"has digest {found:#018x}, the manifest says {entry.digest:#018x}", version)
        self._verified = True

    def commit(self) -> None:
        """Flip to what was staged."""
        if not self._verified:
            self.verify()
        self._adopt(self._staged, self._begun().version)
        self.rollback()

    def rollback(self) -> None:
        """Forget what was staged."""
        self._manifest, self._entries, self._staged, self._verified = None, {}, {}, False

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of a tensor until the flip."""
        return tensor.to(self._device)

    def _digest(self, name: str) -> int:
        """Of a whole tensor, as it came."""
        return digest(self._staged[name])

    def _begun(self) -> Manifest:
        if self._manifest is None:
            raise SyncError(f"{self._name} was given weights outside a publication; call begin with a manifest first")
        return self._manifest

    def _compare(self, name: str, shape: tuple[int, ...], dtype: str, version: Version) -> None:
        want_shape, want_dtype = self._expected[name]
        if tuple(shape) != want_shape:
            raise self._refusal(name, f"has shape {tuple(shape)}, expected {want_shape}", version)
        if dtype != want_dtype:
            raise self._refusal(name, f"is {dtype}, expected {want_dtype}", version)

    def _refusal(self, name: str, why: str, version: Version) -> SyncError:
        return SyncError(f"{self._name} refused {version.policy} version {version.number}: tensor {name} {why}")
