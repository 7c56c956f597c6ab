"""Weight-update protocols of one server: two-phase with a commit (``miles serve``), or in place (stock SGLang).

That of LoRA adapters which requests name is in ``adapter_update``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.backends.remote.adapter_update import AdapterUpdate
from miles.backends.remote.client import RequestRejected, SglangClient
from miles.backends.remote.pool.engine_pool import EngineSlot
from miles.backends.remote.sglang_lora import AdapterFormat
from miles.backends.remote.transports.buckets import Bucket, DigestManifest, ShapeManifest, dtype_name
from miles.core.errors import CheckpointError, SyncError
from miles.models.checkpoint.safetensors_io import StoredTensor, stored_tensors

UPDATE_PATH = "/weights_publication"

# Suffix of the scales of block FP8 in a checkpoint.
_SCALE = "_scale_inv"


class UnchangedWeightMismatch(SyncError):
    """A server was to keep its unchanged weights, but these differ from the sender's."""


class UpdateProtocol(Protocol):
    """The steps of a weight update. ``RequestRejected``: the server rejects one; ``ServerLost``: it is gone.

    ``requires_pause``: the server must be paused from ``begin`` on, because each bucket changes its weights at once.
    ``overwritten``: its weights were written over, and can only be restored by sending them again. ``names_versions``:
    requests name their version, so that those in flight end with theirs, and an update has all tensors of a version.
    """

    slot: EngineSlot
    client: SglangClient
    requires_pause: bool
    overwritten: bool
    names_versions: bool

    async def begin(self, shapes: ShapeManifest) -> None: ...
    async def send_bucket(self, bucket: Bucket) -> None: ...
    async def announce_bucket(self, bucket: Bucket, group: str) -> None: ...
    async def load_from_disk(self, folder: Path) -> None: ...
    async def verify(self, digests: DigestManifest) -> str | None:
        """A checksum that must be the same on all servers; None if the server has compared the digests itself."""
        ...

    async def commit(self, label: str) -> None: ...
    async def rollback(self) -> None: ...


ForEachServer = Callable[[Sequence[UpdateProtocol], Callable[[UpdateProtocol], Any]], Any]
"""Runs a step for all servers at once and returns those that are left; lost servers are marked as failed."""


class StagedUpdate:
    """``miles serve``: nothing changes before ``commit``, except by in-place writes; the server checks the digests."""

    requires_pause = False
    names_versions = False

    def __init__(self, slot: EngineSlot, client: SglangClient, seconds: float) -> None:
        self.slot = slot
        self.client = client
        self._seconds = seconds
        self.overwritten = False
        """Were its weights written over in place without a commit?"""
        self.expected_digests: str | None = None
        """The digests that its in-place writes must have for the commit."""
        self.resume_on_commit = False
        """Does it resume generation when it commits in-place writes?"""

    async def begin(self, shapes: ShapeManifest) -> None:
        await self._post(shapes.begin_body)

    async def fetch_location(self) -> Mapping[str, str]:
        """Its machine and device."""
        return {name: str(value) for name, value in (await self._post({"action": "where"})).items()}

    async def open_windows(self, windows: Sequence[Mapping[str, Any]]) -> None:
        """Map shared windows of this process's memory, until the ``last`` copy."""
        await self._post({"action": "open", "windows": list(windows)})

    async def copy_window(self, window: int, names: Sequence[str], offsets: Sequence[int], *, last: bool) -> None:
        """Copy tensors out of a window; the ``last`` copy unmaps all windows."""
        body = {"window": window, "names": list(names), "offsets": list(offsets), "last": last}
        await self._post({"action": "copy", **body})

    async def map_memory(self, body: bytes) -> None:
        """Map the memory of this process's weights, until the next call."""
        await self._post(body)

    async def write_in_place(self, epoch: str, which: str | None, pause: str | None = None) -> str:
        """Pause, and write the mapped weights over its own; returns the digests of all its weights afterwards."""
        self.overwritten = True
        body = {"action": "write", "epoch": epoch, "which": which, "pause": pause}
        return str((await self._post(body)).get("digests"))

    async def send_delta(self, body: bytes) -> None:
        """Send the differences to the version it has."""
        await self.client.request("POST", f"{UPDATE_PATH}/changes", data=body, seconds=self._seconds)

    async def send_bucket(self, bucket: Bucket) -> None:
        data = bucket.as_safetensors
        await self.client.request("POST", f"{UPDATE_PATH}/bucket", data=data, seconds=self._seconds)

    async def announce_bucket(self, bucket: Bucket, group: str) -> None:
        body = {**bucket.metadata, "group_name": group, "load_format": "flattened_bucket", "staged": True}
        await self.client.request("POST", "/update_weights_from_distributed", body, seconds=self._seconds)

    async def load_from_disk(self, folder: Path) -> None:
        await self._post({"action": "load", "folder": str(folder.resolve())})

    async def verify(self, digests: DigestManifest) -> str | None:
        result = await self._post(digests.verify_body)
        if (name := result.get("kept_otherwise")) is not None:
            raise UnchangedWeightMismatch(f"{self.client.name} has another {name} than it was sent")
        if result.get("verified") != len(digests):
            raise RequestRejected(f"{self.client.name} verified {result.get('verified')} of {len(digests)} tensors")
        return None

    async def commit(self, label: str) -> None:
        body: dict[str, Any] = {"action": "commit", "weight_version": label}
        if self.expected_digests is not None:
            body |= {"promised": self.expected_digests, "resume": self.resume_on_commit}
        await self._post(body)
        self.overwritten = False
        self.expected_digests = None

    async def rollback(self) -> None:
        self.expected_digests = None
        await self._post({"action": "rollback"})

    async def _post(self, body: Mapping[str, Any] | bytes) -> Mapping[str, Any]:
        return await self.client.request("POST", UPDATE_PATH, body, seconds=self._seconds)


class InPlaceUpdate:
    """Stock SGLang: each bucket is written over the weights at once, so they are checked against its checkpoint before.

    SGLang ignores unknown names and exits on wrong shapes, both without an error response; FP8 values that it takes for
    wide ones, or the other way round, it converts without their scales.

    A draft model takes the same tensors as the policy, from a request or from disk. MTP layers are in the policy's
    checkpoint and select theirs by name; a head or a model from elsewhere would take the policy's for its own.
    """

    requires_pause = overwritten = True
    names_versions = False

    def __init__(
        self,
        slot: EngineSlot,
        client: SglangClient,
        seconds: float,
        *,
        model_path: str,
        ranks: int,
        has_foreign_draft: bool = False,
    ) -> None:
        self.slot = slot
        self.client = client
        self._seconds = seconds
        self._folder = Path(model_path)
        self._ranks = ranks
        self._has_foreign_draft = has_foreign_draft

    async def begin(self, shapes: ShapeManifest) -> None:
        unscaled = next((n for n in shapes if _is_fp8(shapes, n) and f"{n}{_SCALE}" not in shapes), None)
        if unscaled is not None:
            raise RequestRejected(
                f"{self.client.name} is SGLang, which does not take {unscaled} as it is packed for miles serve; start "
                "the run with --rollout-backend sglang"
            )
        try:
            stored = stored_tensors(self._folder)
        except CheckpointError:
            return  # the server is on another machine, or its checkpoint is not readable here
        if not stored.keys() & shapes.keys():
            raise RequestRejected(f"{self.client.name} serves {self._folder}, which has no tensor of this model")
        for name, tensor in shapes.items():
            if name in stored and stored[name].shape != tuple(tensor.shape):
                raise RequestRejected(
                    f"{self.client.name} serves {self._folder}, whose {name} has shape {stored[name].shape}, "
                    f"not {tuple(tensor.shape)}"
                )
        self._check_precision(shapes, stored)

    def _check_precision(self, shapes: ShapeManifest, stored: Mapping[str, StoredTensor]) -> None:
        """Raise unless the same tensors are FP8 in the checkpoint and in the update."""
        for name in shapes:
            missing = name.endswith(_SCALE) and name not in stored
            if missing or (name in stored and (stored[name].dtype == "F8_E4M3") != _is_fp8(shapes, name)):
                weight = name.removesuffix(_SCALE)
                served, sent = ("wide", "FP8") if missing or _is_fp8(shapes, name) else ("FP8", "wide")
                raise RequestRejected(
                    f"{self.client.name} serves {self._folder}, whose {weight} is {served}, but is sent {sent} weights;"
                    " start it on a checkpoint in the format of --rollout-precision (miles convert writes one)"
                )

    async def send_bucket(self, bucket: Bucket) -> None:
        parts = [bucket.as_pickle] * self._ranks
        body: dict[str, Any] = {"serialized_named_tensors": parts, "load_format": "flattened_bucket"}
        body |= {"flush_cache": False, "disable_draft_model": self._has_foreign_draft}
        await self.client.request("POST", "/update_weights_from_tensor", body, seconds=self._seconds)

    async def announce_bucket(self, bucket: Bucket, group: str) -> None:
        body = {**bucket.metadata, "group_name": group, "load_format": "flattened_bucket", "flush_cache": False}
        await self.client.request("POST", "/update_weights_from_distributed", body, seconds=self._seconds)

    async def load_from_disk(self, folder: Path) -> None:
        if self._has_foreign_draft:
            raise RequestRejected(
                f"{self.client.name} is SGLang, which would load the policy from disk into its draft model, too; use "
                "--update-weight-transport tensor or distributed"
            )
        body = {"model_path": str(folder.resolve()), "flush_cache": False}
        await self.client.request("POST", "/update_weights_from_disk", body, seconds=self._seconds)

    async def verify(self, digests: DigestManifest) -> str | None:
        """SGLang's own checksum of all its weights, which it computes on CUDA only."""
        if not self.client.has_checksums:
            return None
        body = {"action": "checksum"}
        try:
            result = await self.client.request("POST", "/weights_checker", body, seconds=self._seconds)
        except RequestRejected:
            self.client.has_checksums = False
            return None
        checksum = result.get("per_engine_checksum") if isinstance(result, dict) else None
        return None if checksum is None else str(checksum)

    async def commit(self, label: str) -> None:
        if not await self.client.flush():
            raise RequestRejected(f"{self.client.name} could not flush its cache, which requests still use")
        body = {"new_version": label, "abort_all_requests": False}
        await self.client.request("POST", "/update_weight_version", body, seconds=self._seconds)

    async def rollback(self) -> None:
        """Nothing: the sender restores the overwritten weights."""


def _is_fp8(shapes: ShapeManifest, name: str) -> bool:
    return dtype_name(shapes[name]) == "float8_e4m3fn"


async def create_update_protocol(
    slot: EngineSlot, client: SglangClient, seconds: float, adapter: AdapterFormat | None = None
) -> UpdateProtocol:
    """The weight-update protocol of this kind of server; ``adapter`` is the format of a run's unmerged adapters."""
    info = await client.fetch_info()
    if info.kind == "miles" and (adapter is None or not adapter.num_versions):
        return StagedUpdate(slot, client, seconds)
    if adapter is not None:
        return AdapterUpdate(slot, client, seconds, info=info, adapter=adapter)
    return InPlaceUpdate(
        slot,
        client,
        seconds,
        model_path=info.model_path,
        ranks=info.ranks,
        has_foreign_draft=info.has_foreign_draft,
    )


def require_staged(update: UpdateProtocol) -> StagedUpdate:
    assert isinstance(update, StagedUpdate)
    return update


def describe_verification(update: UpdateProtocol, checksum: str | None, count: int) -> str:
    """A sentence on what a server verifies."""
    if update.names_versions:
        return (
            f"{update.slot.name} loads each version as a new adapter and compares the checksum of each tensor; "
            "requests in flight end with the adapter that they began with."
        )
    if not update.requires_pause:
        return f"{update.slot.name} verifies the digest of each of {count} tensors before it commits new weights."
    if checksum is not None:
        return f"{update.slot.name} updates weights in place; its checksum must equal that of the other servers."
    return (
        f"{update.slot.name} updates weights in place and computes no checksums: names and shapes of {count} tensors "
        "are checked before they are sent, and the response to each bucket afterwards."
    )


def check_checksums_agree(checksums: Sequence[tuple[UpdateProtocol, str | None]]) -> None:
    """Raise ``SyncError`` if servers report different checksums of the same weights."""
    reported = [(update, checksum) for update, checksum in checksums if checksum is not None]
    for update, checksum in reported[1:]:
        if checksum != reported[0][1]:
            raise SyncError(
                f"{update.slot.name} has other weights than {reported[0][0].slot.name}: their checksums differ"
            )
