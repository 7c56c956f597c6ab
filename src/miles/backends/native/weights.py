"""Take a publication of weights: stage it, check it against the model and its digests, flip at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.manifest import Entry, Manifest
from miles.sync.resident import Counted

Adopt = Callable[[Mapping[str, Tensor], Version, Collection[str]], None]


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
        self._known: dict[str, int] = {}
        self._own: set[str] = set()
        self._counted = Counted()

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

    def receive(self, name: str, tensor: Tensor, known: int | None = None, *, own: bool = False) -> None:
        """Keep a tensor for the flip; a digest that is ``known``, because it was just taken, is not taken again.

        What is the engine's ``own`` nobody else has.
        """
        version = self._begun().version
        if name not in self._entries:
            raise self._refusal(name, "is not a tensor of this model", version)
        if name in self._staged:
            raise self._refusal(name, "came twice", version)
        self._compare(name, tuple(tensor.shape), str(tensor.dtype), version)
        self._staged[name] = self._stage(name, tensor.detach())
        if own:
            self._own.add(name)
        if known is not None:
            self._known[name] = known
        self._verified = False

    def verify(self) -> None:
        """Refuse unless every tensor came and has the bits the manifest says."""
        version = self._begun().version
        for name in self._entries:
            if name not in self._staged:
                raise self._refusal(name, "did not come", version)
        for name, found in self._digests().items():
            said = self._entries[name].digest
            if found != said:
                raise self._refusal(name, f"has digest {found:#018x}, the manifest says {said:#018x}", version)
        self._verified = True

    def commit(self) -> None:
        """Flip to what was staged."""
        if not self._verified:
            self.verify()
        self._adopt(self._staged, self._begun().version, self._own)
        self.rollback()

    def rollback(self) -> None:
        """Forget what was staged."""
        self._manifest, self._entries, self._staged, self._verified = None, {}, {}, False
        self._known, self._own = {}, set()

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """What is kept of a tensor until the flip."""
        return tensor.to(self._device)

    def _digests(self) -> Mapping[str, int]:
        """Of whole tensors, as they came."""
        unknown = {name: tensor for name, tensor in self._staged.items() if name not in self._known}
        return {**self._known, **(self._counted.digests(unknown) if unknown else {})}

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
