"""Receiver of weight updates: stage tensors, check them against the model and their digests, switch at once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.digest_cache import DigestCache
from miles.sync.manifest import Manifest, ManifestEntry

CommitWeights = Callable[[Mapping[str, Tensor], Version, Collection[str], Collection[str]], None]
"""Switches to tensors as a version; of some names the engine owns the memory, and some have changed."""


class StagedWeightUpdate:
    """The staging area of one engine. On any failure the engine keeps its current version."""

    def __init__(
        self, name: str, expected: Mapping[str, Tensor], device: torch.device, commit_weights: CommitWeights
    ) -> None:
        self._name = name
        self._expected = {key: (tuple(tensor.shape), str(tensor.dtype)) for key, tensor in expected.items()}
        self._device = device
        self._commit_weights = commit_weights
        self._manifest: Manifest | None = None
        self._entries: dict[str, ManifestEntry] = {}
        self._staged: dict[str, Tensor] = {}
        self._verified = False
        self._known_digests: dict[str, int] = {}
        self._owned: set[str] = set()
        self._digest_cache = DigestCache()
        self._committed_digests: dict[str, int] = {}

    def begin(self, manifest: Manifest) -> None:
        """Reject a manifest that does not list exactly this model's tensors."""
        self.rollback()
        entries = {entry.name: entry for entry in manifest.entries}
        for name in self._expected:
            if name not in entries:
                raise self._build_error(name, "is missing from the manifest", manifest.version)
        for name, entry in entries.items():
            if name not in self._expected:
                raise self._build_error(name, "is not a tensor of this model", manifest.version)
            self._check_tensor(name, entry.shape, entry.dtype, manifest.version)
        self._manifest, self._entries = manifest, entries

    def receive(self, name: str, tensor: Tensor, known: int | None = None, *, own: bool = False) -> None:
        """Stage a tensor. ``known`` is its digest if just computed; ``own`` says that nobody else uses its memory."""
        version = self._require_manifest().version
        if name not in self._entries:
            raise self._build_error(name, "is not a tensor of this model", version)
        if name in self._staged:
            raise self._build_error(name, "came twice", version)
        self._check_tensor(name, tuple(tensor.shape), str(tensor.dtype), version)
        self._staged[name] = self._stage(name, tensor.detach())
        if own:
            self._owned.add(name)
        if known is not None:
            self._known_digests[name] = known
        self._verified = False

    def verify(self) -> None:
        """Raise unless every tensor was received with the digest in the manifest."""
        version = self._require_manifest().version
        for name in self._entries:
            if name not in self._staged:
                raise self._build_error(name, "did not come", version)
        for name, digest in self._compute_digests().items():
            expected = self._entries[name].digest
            if digest != expected:
                raise self._build_error(name, f"has digest {digest:#018x}, the manifest says {expected:#018x}", version)
        self._verified = True

    def commit(self) -> None:
        """Switch the engine to the staged tensors."""
        if not self._verified:
            self.verify()
        digests = {name: entry.digest for name, entry in self._entries.items()}
        changed = {name for name, digest in digests.items() if self._committed_digests.get(name) != digest}
        self._commit_weights(self._staged, self._require_manifest().version, self._owned, changed)
        self._committed_digests = digests
        self.rollback()

    def forget_committed(self) -> None:
        """Regard all tensors of the next commit as changed, because the current ones are overwritten in place."""
        self._committed_digests = {}

    def rollback(self) -> None:
        """Discard the staged tensors."""
        self._manifest = None
        self._entries = {}
        self._staged = {}
        self._verified = False
        self._known_digests = {}
        self._owned = set()

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """Return the copy or reference of a tensor that is kept until the commit."""
        return tensor.to(self._device)

    def _compute_digests(self) -> Mapping[str, int]:
        """Return the digests of the received tensors, before any sharding."""
        unknown = {name: tensor for name, tensor in self._staged.items() if name not in self._known_digests}
        return {**self._known_digests, **(self._digest_cache.compute_digests(unknown) if unknown else {})}

    def _require_manifest(self) -> Manifest:
        if self._manifest is None:
            raise SyncError(f"{self._name} was given weights outside a publication; call begin with a manifest first")
        return self._manifest

    def _check_tensor(self, name: str, shape: tuple[int, ...], dtype: str, version: Version) -> None:
        expected_shape, expected_dtype = self._expected[name]
        if tuple(shape) != expected_shape:
            raise self._build_error(name, f"has shape {tuple(shape)}, expected {expected_shape}", version)
        if dtype != expected_dtype:
            raise self._build_error(name, f"is {dtype}, expected {expected_dtype}", version)

    def _build_error(self, name: str, problem: str, version: Version) -> SyncError:
        return SyncError(f"{self._name} refused {version.policy} version {version.number}: tensor {name} {problem}")
