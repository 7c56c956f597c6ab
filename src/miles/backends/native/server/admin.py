"""Admin endpoints: abort, pause, flush, sleep, SGLang sessions, and weight updates.

What has begun runs to its end even if the client disconnects: half a pause or half a weight update helps nobody.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from aiohttp import web

from miles.backends.native.server.admin_bodies import (
    AbortBody,
    CloseSessionBody,
    ContinueBody,
    DiskUpdateBody,
    DistributedUpdateBody,
    GroupBody,
    JoinGroupBody,
    MemoryBody,
    OpenSessionBody,
    PauseBody,
    PublicationBody,
    TensorUpdateBody,
    UpdateFields,
    VersionLabelBody,
    WeightsByNameBody,
)
from miles.backends.native.server.generation import json_response
from miles.backends.native.server.model_info import ModelInfo
from miles.backends.native.server.request_handler import RequestHandler
from miles.backends.native.server.weights.groups import PeerThreads, WeightUpdateGroups
from miles.backends.native.server.weights.lora_merge import LoraMerger
from miles.backends.native.server.weights.staging import WeightStaging
from miles.backends.native.server.weights.update import (
    DTYPES,
    WeightUpdater,
    find_small_tensor,
    get_tensor,
    load_safetensors,
    merge_tensors,
)
from miles.core.errors import MilesError, SyncError
from miles.core.types import Version
from miles.models.accounting.params import weight_bytes
from miles.rollout.serving.body import as_list
from miles.rollout.serving.errors import RequestError
from miles.rollout.serving.http import dump_json
from miles.sync.adapters import unpack_adapters

PICKLE_REFUSED = (
    "This server unpickles nothing from the network: send load_format 'safetensors' with base64 of a safetensors file "
    "in serialized_named_tensors, or such a file as the body (application/octet-stream)."
)
ABORTED = "Aborted"
MAX_JOINS = 4
MAX_WAITING_UPDATES = 16
MAX_SHOWN_NUMBERS = 1 << 22


class AdminApi:
    """Each method is one endpoint: the body in, a response out. ``num_ranks`` share the engine's model."""

    def __init__(self, handler: RequestHandler, model_info: ModelInfo, *, num_ranks: int) -> None:
        self._handler = handler
        self._model_info = model_info
        self._engine = handler.engine
        self._updater = WeightUpdater(handler.engine, num_ranks)
        self._staging = WeightStaging(handler.engine, num_ranks)
        self._merger = LoraMerger(handler.engine, num_ranks, lambda: Path(model_info.model_path))
        self._groups: WeightUpdateGroups | None = None
        # Trainers with several sources of weights have an engine join their groups in any order, so not one by one.
        self._joins = PeerThreads(at_once=MAX_JOINS, waiting=0)
        self._receives = PeerThreads(at_once=1, waiting=MAX_WAITING_UPDATES)

    @property
    def max_weight_body(self) -> int:
        """Bytes of the largest body of weights."""
        return (64 << 20) + 2 * weight_bytes(self._engine.spec, "float32")

    # -- requests ---------------------------------------------------------------------------

    async def abort(self, body: AbortBody) -> web.Response:
        """One request by its id, or all; an unknown id is no error."""
        if body.abort_all:
            await self._engine.abort(message=ABORTED)
        else:
            for rid in self._handler.find_rids(body.rid) if body.rid else ():
                await self._engine.abort(rid, ABORTED)
        return web.Response()

    async def pause(self, body: PauseBody) -> web.Response:
        await self._engine.pause(body.mode)
        return json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, body: ContinueBody) -> web.Response:
        await self._engine.resume()
        return json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, timeout: float) -> web.Response:
        """Empty the prefix cache; while requests run that is refused, or waited for up to ``timeout`` seconds."""
        flushed = await self._engine.flush_cache()
        if not flushed and timeout > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._handler.lock.wait_idle(), timeout)
            flushed = await self._engine.flush_cache()
        text = "Cache flushed.\n" if flushed else "The cache was not flushed: requests are running.\n"
        return web.Response(text=text, status=200 if flushed else 400)

    async def sleep(self, body: MemoryBody) -> web.Response:
        """Release the KV cache's memory; weights stay."""
        if "kv_cache" in (as_list(body.tags) or ("kv_cache",)):
            await self._engine.sleep()
        return json_response(None)

    async def wake(self, body: MemoryBody) -> web.Response:
        if "kv_cache" in (as_list(body.tags) or ("kv_cache",)):
            await self._engine.wake()
        return json_response(None)

    async def open_session(self, body: OpenSessionBody) -> web.Response:
        """Open an SGLang session; returns its id."""
        if body.streaming:
            message = "Streaming sessions are not supported by this server; leave streaming out."
            raise RequestError(message, param="streaming")
        id = uuid.uuid4().hex if body.session_id is None else body.session_id
        if not self._handler.sessions.open(id, body.timeout):
            raise RequestError(f"Session {id!r} is open already; close it first.", param="session_id")
        return json_response(id)

    async def close_session(self, body: CloseSessionBody) -> web.Response:
        self._handler.sessions.close(body.session_id)
        return web.Response()

    # -- weights ----------------------------------------------------------------------------

    async def update_from_disk(self, body: DiskUpdateBody) -> web.Response:
        async def update() -> Version:
            version = await self._updater.update_from_disk(body.model_path)
            self._model_info.model_path = body.model_path
            return version

        return await self._update(body, update, num_paused=0)

    async def update_from_tensor(self, body: TensorUpdateBody) -> web.Response:
        if body.load_format != "safetensors":
            return _failure(PICKLE_REFUSED)

        async def update() -> Version:
            return await self._update_from_files(list(map(_decode_base64, body.serialized_named_tensors)))

        return await self._update(body, update)

    async def update_from_file(self, fields: UpdateFields, content: bytes) -> web.Response:
        """The body is a safetensors file."""
        return await self._update(fields, lambda: self._update_from_files([content]))

    async def _update_from_files(self, files: list[bytes]) -> Version:
        tensors = {name: tensor for content in files for name, tensor in load_safetensors(content).items()}
        return await self._updater.update_from_tensors(tensors)

    async def publish(self, body: PublicationBody) -> web.Response:
        """One step of a two-phase weight publication: manifest, tensors, digests, commit or rollback."""
        if body.action == "commit" and body.promised is not None:
            return await self._commit_in_place(body, body.promised)
        if body.action == "commit":
            return await self._update(body, self._commit)
        if body.action == "write" and body.pause is not None:
            await self._engine.pause(body.pause)
        try:
            result = await asyncio.to_thread(self._staging.run_step, body, self.max_weight_body)
        except SyncError as error:
            return _failure(str(error))
        return json_response({"success": True, "message": f"Did {body.action}.", **result})

    async def stage_bucket(self, content: bytes) -> web.Response:
        """Tensors of a begun publication: a safetensors file."""

        async def stage() -> None:
            self._staging.add_tensors(await asyncio.to_thread(load_safetensors, content))

        return await _run(stage(), "Staged.")

    async def stage_changes(self, content: bytes) -> web.Response:
        """A delta of a publication's tensors against the current version (see ``sync.delta``)."""
        label = self._handler.weight_version
        return await _run(asyncio.to_thread(self._staging.add_delta, content, label, self.max_weight_body), "Staged.")

    async def stage_adapters(self, content: bytes) -> web.Response:
        """LoRA factors to be merged into the base of a publication's matrices (see ``sync.adapters``)."""

        def stage() -> None:
            self._staging.add_tensors(self._merger.merge(unpack_adapters(content)))

        return await _run(asyncio.to_thread(stage), "Staged.")

    async def _commit_in_place(self, body: PublicationBody, promised: str) -> web.Response:
        """The weights are written already: compare digests, and resume generation where the sender says so."""

        async def commit() -> Version:
            return self._staging.writer.commit(promised)

        response = await self._update(body, commit)
        if response.status == 200 and body.resume:
            await self._engine.resume()
        return response

    async def _commit(self) -> Version:
        tensors, received = await asyncio.to_thread(self._staging.take_verified)
        if not received.tensors:
            return await self._updater.update_from_tensors(tensors)
        if not tensors:
            return await self._updater.update_from_placed(received.tensors, received.digests)
        engine = self._engine
        current = {**engine.weights(), **received.tensors}
        return await self._updater.update_from_placed(
            await asyncio.to_thread(merge_tensors, engine.spec, current, tensors), {}
        )

    async def join_group(self, body: JoinGroupBody) -> web.Response:
        if body.rank_offset >= body.world_size:
            message = f"rank_offset is {body.rank_offset}, but must be below the world_size of {body.world_size}."
            raise RequestError(message, param="rank_offset")
        if self._groups is None:
            self._groups = WeightUpdateGroups((await asyncio.to_thread(find_small_tensor, self._engine)).device)
        join = partial(
            self._groups.join,
            body.group_name,
            backend=body.backend,
            address=body.master_address,
            port=body.master_port,
            rank=body.rank_offset,
            world_size=body.world_size,
        )
        return await _run(self._joins(join), "Succeeded to initialize custom process group.")

    async def leave_group(self, body: GroupBody) -> web.Response:
        if self._groups is None:
            return _failure(f"There is no group {body.group_name!r}.")
        leave = partial(self._groups.leave, body.group_name)
        return await _run(self._joins(leave), "Succeeded to destroy custom process group.")

    async def update_from_group(self, body: DistributedUpdateBody) -> web.Response:
        if body.load_format not in (None, "", "flattened_bucket"):
            message = f"load_format is {body.load_format!r}, but must be flattened_bucket, or absent."
            raise RequestError(message, param="load_format", malformed=True)
        tensors = _read_specs(body, 4 * weight_bytes(self._engine.spec, "float32"))
        groups = self._groups
        if groups is None:
            return _failure(f"There is no group {body.group_name!r}; create it with init_weights_update_group first.")
        flattened = body.load_format == "flattened_bucket"

        receive = partial(groups.receive, body.group_name, tensors, flattened=flattened)
        try:  # before generation waits for the update: the sender may never send
            received = await self._receives(receive)
            if body.staged:  # part of a two-phase publication
                self._staging.add_tensors(received)
                return json_response({"success": True, "message": "Staged."})
        except SyncError as error:
            return _failure(str(error))
        return await self._update(body, lambda: self._updater.update_from_tensors(received))

    async def set_version_label(self, body: VersionLabelBody) -> web.Response:
        """Give the current weights another ``weight_version``."""
        label = body.new_version
        if body.abort_all_requests:
            await self._engine.abort(message=ABORTED)
        if self._engine.version is not None:
            self._handler.labels.set(self._engine.version, label)
        return json_response({"success": True, "message": f"Weight version updated to {label}", "new_version": label})

    async def get_weights(self, body: WeightsByNameBody) -> web.Response:
        """The first rows of a tensor, by its Hugging Face name."""

        def read_rows() -> bytes:
            tensor = get_tensor(self._engine.spec, self._engine.weights(), body.name)
            if tensor is None:
                raise RequestError(f"{body.name} is not a tensor of this model.", param="name")
            rows = tensor[: body.truncate_size]
            if rows.numel() > MAX_SHOWN_NUMBERS:
                message = (
                    f"{len(rows)} rows of {body.name} have {rows.numel()} numbers, but the limit is "
                    f"{MAX_SHOWN_NUMBERS}; lower truncate_size."
                )
                raise RequestError(message, param="truncate_size")
            return dump_json(rows.float().cpu().tolist())

        return web.Response(body=await asyncio.to_thread(read_rows), content_type="application/json")

    async def _update(
        self, fields: UpdateFields, update: Callable[[], Awaitable[Version]], num_paused: int | None = None
    ) -> web.Response:
        """Update weights as SGLang does: at once when paused, otherwise when the running requests have ended."""
        label = fields.weight_version
        if fields.abort_all_requests:
            await self._engine.abort(message=ABORTED)
        previous = self._handler.weight_version
        extra: dict[str, Any] = {} if num_paused is None else {"num_paused_requests": num_paused}
        try:
            async with self._handler.lock.acquire_write(immediate=self._engine.is_paused):
                version = await update()
                self._handler.labels.set(version, previous if label is None else label)
        except MilesError as error:
            return _failure(str(error), **extra)
        message = "Succeeded to update model weights."
        if label is not None:
            message += f" Weight version updated to {label}."
        return json_response({"success": True, "message": message, **extra})

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()


async def run_to_end(work: Awaitable[web.Response]) -> web.Response:
    """Complete ``work`` even if the client disconnects."""
    return await asyncio.shield(asyncio.ensure_future(work))


async def _run(work: Awaitable[None], message: str) -> web.Response:
    try:
        await work
    except SyncError as error:
        return _failure(str(error))
    return json_response({"success": True, "message": message})


def _failure(message: str, **extra: Any) -> web.Response:
    return json_response({"success": False, "message": message, **extra}, 400)


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"serialized_named_tensors is not base64: {error}.") from error


def _read_specs(body: DistributedUpdateBody, max_bytes: int) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Names, dtypes and shapes of the tensors to receive."""
    names = as_list(body.names)
    dtypes = as_list(body.dtypes)
    shapes = body.shapes
    if not names or not len(names) == len(dtypes) == len(shapes):
        message = "names, dtypes and shapes must be non-empty lists of one length."
        raise RequestError(message, param="names", malformed=True)
    tensors: list[tuple[str, Any, tuple[int, ...]]] = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        dtype_name = dtype.removeprefix("torch.")
        if dtype_name not in DTYPES:
            raise RequestError(f"dtypes has {dtype!r}, but weights are floating-point numbers.", param="dtypes")
        tensors.append((name, DTYPES[dtype_name], tuple(shape)))
    total = sum(prod(shape) * dtype.itemsize for _, dtype, shape in tensors)
    if total > max_bytes:
        message = f"The announced tensors have {total} bytes together, far more than this model."
        raise RequestError(message, param="shapes")
    return tensors
