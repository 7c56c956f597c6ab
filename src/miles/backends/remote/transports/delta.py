"""The transport ``delta``: ``miles serve`` servers with the last version are sent differences, others all weights."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from miles.backends.remote.client import RequestRejected
from miles.backends.remote.pool.engine_pool import weight_version_label
from miles.backends.remote.transports.buckets import Bucket
from miles.backends.remote.transports.senders import WeightTransport
from miles.backends.remote.update_protocols import ForEachServer, StagedUpdate, UpdateProtocol
from miles.core.types import Version
from miles.sync.delta import encode_delta


class DeltaTransport(WeightTransport):
    """A transport whose base is set to the last committed version before each update (``set_base``)."""

    def __init__(self) -> None:
        self._base: Version | None = None
        self._base_tensors: Mapping[str, Tensor] = {}
        self._without_base: set[UpdateProtocol] = set()
        self._send_full = False
        self.sent = 0
        """Bytes of differences encoded since the start."""

    def set_base(self, version: Version | None, tensors: Mapping[str, Tensor]) -> None:
        """The version servers should have, and its tensors."""
        self._base, self._base_tensors = (None, {}) if self._send_full else (version, tensors)
        self._send_full = False

    def retry_full(self) -> bool:
        """After an update that failed: is another try useful, in which all servers are sent all weights?"""
        self._send_full = self._base is not None
        return self._send_full

    async def begin(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        self._without_base = {
            update for update in updates if not isinstance(update, StagedUpdate) or update.slot.version != self._base
        }

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        body = b""
        if self._base is not None and any(update not in self._without_base for update in updates):
            label = weight_version_label(self._base)
            body = await asyncio.to_thread(encode_delta, label, self._base_tensors, bucket.tensors)
            self.sent += len(body)

        async def send(update: UpdateProtocol) -> None:
            if body and update not in self._without_base and isinstance(update, StagedUpdate):
                try:
                    await update.send_delta(body)
                    return
                except RequestRejected:  # it does not have the base: it is sent all weights from here on
                    self._without_base.add(update)
            await update.send_bucket(bucket)

        await for_each(updates, send)

    async def close(self) -> None:
        self._base_tensors = {}
