"""The transport of LoRA adapters: ``miles serve`` servers are sent the factors, and merge them into their base weights.

The result is verified against the digests of the trainer's own merged matrices, as after any other transport. A server
with another base, or of another kind, is sent the merged matrices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from miles.backends.remote.client import RequestRejected
from miles.backends.remote.committed_weights import bucket_with_digests
from miles.backends.remote.pool.engine_pool import EngineSlot
from miles.backends.remote.transports.buckets import Bucket, Named
from miles.backends.remote.transports.delta import DeltaTransport
from miles.backends.remote.transports.ipc import IpcTransport, send_through_windows
from miles.backends.remote.transports.senders import HttpTransport
from miles.backends.remote.update_protocols import UPDATE_PATH, ForEachServer, StagedUpdate, UpdateProtocol
from miles.models.checkpoint import hf, param_map
from miles.models.lora.adapters import LoraAdapters
from miles.models.lora.targets import LoraSpec
from miles.models.spec import DecoderSpec
from miles.sync.adapters import AdapterPayload, Pair, pack_adapters
from miles.sync.manifest import compute_digests

# How often the merged matrices of servers may differ from the trainer's before adapters are not sent any more.
_MAX_FAILURES = 2


class LoraTransport(DeltaTransport):
    """``adapters`` returns the current factors, ``base_digests`` those of the base matrices.

    ``sent`` counts the bytes of adapters sent to each server since the start.
    """

    def __init__(
        self,
        adapters: Callable[[], LoraAdapters],
        base_digests: Callable[[], Mapping[str, int]],
        *,
        seconds: float,
        log: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        super().__init__()
        self._adapters = adapters
        self._compute_base_digests = base_digests
        self._seconds = seconds
        self._log = log
        self._ipc = IpcTransport(HttpTransport(), log)
        self._base_digests: Mapping[str, int] | None = None
        self._unsupported: set[EngineSlot] = set()
        self._failures = 0
        self._used = False

    def retry_full(self) -> bool:
        """After an update that failed: is another try useful, in which all servers are sent matrices?"""
        if self._used:
            self._failures += 1
            self._send_full = True
            if self._failures == _MAX_FAILURES:
                self._log("servers merged the adapters incorrectly; from now on the merged matrices are sent.")
        return self._used

    async def send(
        self,
        groups: Sequence[Sequence[Named]],
        updates: list[UpdateProtocol],
        for_each: ForEachServer,
        before: Mapping[str, int],
    ) -> tuple[list[UpdateProtocol], dict[str, int], int]:
        """Send tensors that differ from ``before``: the servers left, the digest of every tensor, the bytes sent."""
        self._used = False
        send_matrices = self._send_full or self._failures >= _MAX_FAILURES or not before
        self._send_full = False
        if not before and await self._ipc.reaches(updates, groups):
            updates, digests = await send_through_windows(groups, updates, for_each, before)
            return updates, digests, sum(tensor.nbytes for group in groups for _, tensor in group)
        digests: dict[str, int] = {}
        size = 0
        for group in groups:
            group_digests = await asyncio.to_thread(compute_digests, {name: t.detach() for name, t in group})
            digests |= group_digests
            changed = [(name, tensor) for name, tensor in group if group_digests[name] != before.get(name)]
            if changed:
                names = [name for name, _ in changed]
                body = b"" if send_matrices else await asyncio.to_thread(self._encode_adapters, names)
                size += len(body) or sum(tensor.nbytes for _, tensor in changed)
                updates = await for_each(updates, self._build_step(body, changed, group_digests))
        return updates, digests, size

    def _build_step(
        self, body: bytes, changed: Sequence[Named], digests: Mapping[str, int]
    ) -> Callable[[UpdateProtocol], Awaitable[None]]:
        """Sends one server the adapters or else the matrices, which are copied to the host once, if at all."""
        packing: list[asyncio.Task[Bucket]] = []

        async def send(update: UpdateProtocol) -> None:
            if body and update.slot not in self._unsupported and isinstance(update, StagedUpdate):
                try:
                    await update.client.request("POST", f"{UPDATE_PATH}/adapters", data=body, seconds=self._seconds)
                    self._used = True
                    self.sent += len(body)
                    return
                except RequestRejected as error:
                    self._unsupported.add(update.slot)
                    self._log(f"{update.slot.name} rejects adapters ({error}); it is sent the merged matrices.")
            if not packing:
                packing.append(asyncio.create_task(asyncio.to_thread(_pack_matrices, changed, digests)))
            await update.send_bucket(await packing[0])

        return send

    def _encode_adapters(self, names: Collection[str]) -> bytes:
        """The factors of these matrices; nothing if some have no adapter."""
        if self._base_digests is None:
            self._base_digests = self._compute_base_digests()
        base = self._base_digests
        adapters = self._adapters()
        mergeable = not adapters.lora.use_dora and not any(target.is_stacked for target in adapters.lora.targets)
        if not mergeable or not all(name in base for name in names):
            return b""
        wanted = set(names)
        return pack_adapters(
            AdapterPayload(
                scale=adapters.lora.scale,
                base={name: base[name] for name in names},
                factors={name: pair for name, pair in _list_matrix_factors(adapters) if name in wanted},
            )
        )


def _list_matrix_factors(adapters: LoraAdapters) -> Iterator[tuple[str, Pair]]:
    """The factors of every matrix with an adapter by its checkpoint name; experts are matrices each."""
    for target in adapters.lora.targets:
        a, b = adapters.factors(target)
        if not target.experts:
            yield f"{target.module}.weight", (a, b)
            continue
        count = len(target.experts)
        for piece, a_rI, b_Or in zip(
            target.experts, a.expand(count, *a.shape[1:]), b.expand(count, *b.shape[1:]), strict=True
        ):
            yield piece.hf_name, (a_rI, b_Or)


def _pack_matrices(changed: Sequence[Named], digests: Mapping[str, int]) -> Bucket:
    with torch.no_grad():
        return bucket_with_digests({name: tensor.detach().cpu().contiguous() for name, tensor in changed}, digests)


def base_digests(folder: Path, spec: DecoderSpec, lora: LoraSpec, dtype: torch.dtype) -> dict[str, int]:
    """Digests of the checkpoint's matrices that have adapters, by checkpoint names; read one parameter at a time."""
    wanted, pieces = {target.param_name for target in lora.targets}, param_map.build_param_map(spec)
    digests: dict[str, int] = {}
    for name, tensor in hf.load_slices(folder, rank=0, world=1, device="cpu", dtype=dtype):
        if name in wanted:
            digests |= compute_digests({piece.hf_name: piece.view(tensor).contiguous() for piece in pieces[name]})
    return digests
