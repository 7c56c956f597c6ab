"""The half of the API that steers the engine: abort, pause, flush, sleep, and new weights.

What has begun is carried to its end even if the client hangs up: half a pause or half a flip helps nobody.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from aiohttp import web

from miles.backends.native.engine import PauseMode
from miles.backends.native.server.card import Card
from miles.backends.native.server.desk import Desk
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.groups import Groups
from miles.backends.native.server.merging import Merging
from miles.backends.native.server.refusal import Refusal, malformed
from miles.backends.native.server.staging import ACTIONS, Staging
from miles.backends.native.server.stream import dumps
from miles.backends.native.server.weights import DTYPES, Intake, by_name, from_bytes, merged, small_one
from miles.core.errors import MilesError, SyncError
from miles.core.types import Version
from miles.models.footprint import weight_bytes
from miles.sync.adapters import unpacked

PICKLED = (
    "This server unpickles nothing that comes over the network: send load_format 'safetensors' with base64 of a "
    "safetensors file in serialized_named_tensors, or such a file as the body (application/octet-stream)."
)
_FLUSHED = "Cache flushed.\n"
_BUSY = "The cache was not flushed: there are requests under way.\n"
MOST_SHOWN = 1 << 20
ABORTED = "Aborted"
MODES: Mapping[str, PauseMode] = {"abort": "abort", "retract": "retract", "in_place": "in_place"}


def json_reply(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=dumps(value), status=status, content_type="application/json")


class Control:
    """Each method is one endpoint: the body in, a response out."""

    def __init__(self, desk: Desk, card: Card, *, ranks: int) -> None:
        self._desk = desk
        self._card = card
        self._engine = desk.engine
        self._intake = Intake(desk.engine, ranks)
        self._staging = Staging(desk.engine, ranks)
        self._merging = Merging(desk.engine, ranks, lambda: Path(card.model_path))
        self._groups: Groups | None = None

    # -- requests ---------------------------------------------------------------------------

    async def abort(self, fields: Fields) -> web.Response:
        """One request by its name, or all; a name that nobody has is no error."""
        rid = fields.text("rid")
        if fields.flag("abort_all"):
            await self._engine.abort(message=ABORTED)
        else:
            for each in self._desk.rids_of(rid) if rid else ():
                await self._engine.abort(each, ABORTED)
        return web.Response()

    async def pause(self, fields: Fields) -> web.Response:
        await self._engine.pause(_mode(fields, "mode"))
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, fields: Fields) -> web.Response:
        await self._engine.resume()
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, timeout: float) -> web.Response:
        """Forget all prefixes; while requests are under way that is refused, or waited for ``timeout`` seconds."""
        flushed = await self._engine.flush()
        if not flushed and timeout > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._desk.gate.empty(), timeout)
            flushed = await self._engine.flush()
        return web.Response(text=_FLUSHED if flushed else _BUSY, status=200 if flushed else 400)

    async def sleep(self, fields: Fields) -> web.Response:
        """Give the cache's memory back; weights stay."""
        if "kv_cache" in _tags(fields):
            await self._engine.sleep()
        return json_reply(None)

    async def wake(self, fields: Fields) -> web.Response:
        if "kv_cache" in _tags(fields):
            await self._engine.wake()
        return json_reply(None)

    # -- weights ----------------------------------------------------------------------------

    async def from_disk(self, fields: Fields) -> web.Response:
        folder = fields.needed_text("model_path")

        async def update() -> Version:
            version = await self._intake.from_disk(folder)
            self._card.model_path = folder
            return version

        return await self._updated(fields, update, paused=0)

    async def from_tensor(self, fields: Fields) -> web.Response:
        given = fields.array("serialized_named_tensors")
        if given is None or not all(isinstance(part, str) for part in given):
            raise fields.refuse("serialized_named_tensors", "a list of base64 texts")
        if fields.text("load_format") != "safetensors":
            return json_reply({"success": False, "message": PICKLED}, 400)
        return await self._updated(fields, lambda: self._from_parts([_decoded(part) for part in given]))

    async def from_body(self, fields: Fields, body: bytes) -> web.Response:
        """A safetensors file as it is."""
        return await self._updated(fields, lambda: self._from_parts([body]))

    async def _from_parts(self, parts: list[bytes]) -> Version:
        tensors = {name: tensor for part in parts for name, tensor in from_bytes(part).items()}
        return await self._intake.from_tensors(tensors)

    async def publication(self, fields: Fields) -> web.Response:
        """A step of a publication in several: a manifest, tensors from disk, digests, the flip, or none."""
        action = fields.needed_text("action")
        if action not in ACTIONS:
            raise fields.refuse("action", f"one of {', '.join(ACTIONS)}")
        if action == "commit" and "promised" in fields:
            return await self._commit_written(fields)
        if action == "commit":
            return await self._updated(fields, self._commit)
        if action == "write" and "pause" in fields:
            await self._engine.pause(_mode(fields, "pause"))
        try:
            told = await asyncio.to_thread(self._staging.step, action, fields)
        except SyncError as error:
            return json_reply({"success": False, "message": str(error)}, 400)
        return json_reply({"success": True, "message": f"Did {action}.", **told})

    async def bucket(self, body: bytes) -> web.Response:
        """Tensors of a publication that was begun: a safetensors file."""

        async def stage() -> None:
            self._staging.receive(await asyncio.to_thread(from_bytes, body))

        return await _tried(stage(), "Staged.")

    async def changes(self, body: bytes) -> web.Response:
        """What has changed of a publication's tensors since the version there is (see sync.changes)."""
        label = self._desk.labels.of(self._engine.version)
        limit = (64 << 20) + 2 * weight_bytes(self._engine.spec, "float32")
        return await _tried(asyncio.to_thread(self._staging.change, body, label, limit), "Staged.")

    async def adapters(self, body: bytes) -> web.Response:
        """Factors that are added to the base of a publication's matrices (see sync.adapters)."""

        def stage() -> None:
            self._staging.receive(self._merging.merged(unpacked(body)))

        return await _tried(asyncio.to_thread(stage), "Staged.")

    async def _commit_written(self, fields: Fields) -> web.Response:
        """Nothing is left to do but to look at numbers; and to go on, where the sender says so."""

        async def commit() -> Version:
            return self._staging.writing.commit(fields)

        response = await self._updated(fields, commit)
        if response.status == 200 and fields.flag("resume"):
            await self._engine.resume()
        return response

    async def _commit(self) -> Version:
        tensors, landed = await asyncio.to_thread(self._staging.taken)
        if not landed.tensors:
            return await self._intake.from_tensors(tensors)
        if not tensors:
            return await self._intake.from_placed(landed.tensors, landed.digests)
        engine = self._engine
        both = await asyncio.to_thread(merged, engine.spec, {**engine.weights(), **landed.tensors}, tensors)
        return await self._intake.from_placed(both, {})

    async def join_group(self, fields: Fields) -> web.Response:
        name = fields.text("group_name") or "weight_update_group"
        backend = fields.text("backend") or "nccl"
        if backend not in ("nccl", "gloo"):
            raise fields.refuse("backend", "nccl or gloo")
        address = fields.needed_text("master_address")
        port = _needed_integer(fields, "master_port", 1, 65535)
        world = _needed_integer(fields, "world_size", 2, 1 << 20)
        rank = _needed_integer(fields, "rank_offset", 1, world - 1)
        if self._groups is None:
            self._groups = Groups((await asyncio.to_thread(small_one, self._engine)).device)
        groups = self._groups
        return await _tried(
            asyncio.to_thread(groups.join, name, backend=backend, address=address, port=port, rank=rank, world=world),
            "Succeeded to initialize custom process group.",
        )

    async def leave_group(self, fields: Fields) -> web.Response:
        name = fields.text("group_name") or "weight_update_group"
        if self._groups is None:
            return json_reply({"success": False, "message": f"There is no group {name!r}."}, 400)
        return await _tried(asyncio.to_thread(self._groups.leave, name), "Succeeded to destroy custom process group.")

    async def from_group(self, fields: Fields) -> web.Response:
        name = fields.text("group_name") or "weight_update_group"
        how = fields.text("load_format")
        if how not in (None, "", "flattened_bucket"):
            raise fields.refuse("load_format", "flattened_bucket, or nothing")
        tensors = _announced(fields, 4 * weight_bytes(self._engine.spec, "float32"))
        groups = self._groups
        if groups is None:
            message = f"There is no group {name!r}; make one with init_weights_update_group first."
            return json_reply({"success": False, "message": message}, 400)

        async def received() -> dict[str, Any]:
            return await asyncio.to_thread(groups.receive, name, tensors, flat=how == "flattened_bucket")

        async def stage() -> None:
            self._staging.receive(await received())

        async def update() -> Version:
            return await self._intake.from_tensors(await received())

        if fields.flag("staged"):  # for a publication in several steps
            return await _tried(stage(), "Staged.")
        return await self._updated(fields, update)

    async def label(self, fields: Fields) -> web.Response:
        """Call the weights there are by another name."""
        word = fields.needed_text("new_version")
        if fields.flag("abort_all_requests", True):
            await self._engine.abort(message=ABORTED)
        version = self._engine.version
        if version is not None:
            self._desk.labels.put(version, word)
        return json_reply({"success": True, "message": f"Weight version updated to {word}", "new_version": word})

    async def show(self, fields: Fields) -> web.Response:
        """The first rows of a tensor, by its Hugging Face name."""
        name = fields.needed_text("name")
        most = fields.integer("truncate_size", 100, low=0, high=MOST_SHOWN)

        def rows() -> list[Any] | None:
            tensor = by_name(self._engine.spec, self._engine.weights(), name)
            return None if tensor is None else tensor[:most].float().cpu().tolist()

        shown = await asyncio.to_thread(rows)
        if shown is None:
            raise Refusal(f"{name} is not a tensor of this model.", param="name")
        return json_reply(shown)

    async def _updated(
        self, fields: Fields, update: Callable[[], Awaitable[Version]], paused: int | None = None
    ) -> web.Response:
        """Change weights as SGLang does: at once when paused, else when the requests under way have ended."""
        word = fields.text("weight_version")
        if fields.flag("abort_all_requests"):
            await self._engine.abort(message=ABORTED)
        before = self._desk.labels.of(self._engine.version)
        more: dict[str, Any] = {} if paused is None else {"num_paused_requests": paused}
        try:
            async with self._desk.gate.closed(at_once=self._engine.resting):
                version = await update()
                self._desk.labels.put(version, before if word is None else word)
        except MilesError as error:
            return json_reply({"success": False, "message": str(error), **more}, 400)
        told = "Succeeded to update model weights." + ("" if word is None else f" Weight version updated to {word}.")
        return json_reply({"success": True, "message": told, **more})

    def close(self) -> None:
        if self._groups is not None:
            self._groups.close()


async def carried_out(work: Awaitable[web.Response]) -> web.Response:
    """Do it to its end, whoever stops waiting for it."""
    return await asyncio.shield(asyncio.ensure_future(work))


async def _tried(work: Awaitable[None], told: str) -> web.Response:
    try:
        await work
    except SyncError as error:
        return json_reply({"success": False, "message": str(error)}, 400)
    return json_reply({"success": True, "message": told})


def _mode(fields: Fields, name: str) -> PauseMode:
    mode = fields.text(name) or "abort"
    if mode not in MODES:
        raise fields.refuse(name, "abort, retract or in_place")
    return MODES[mode]


def _tags(fields: Fields) -> tuple[str, ...]:
    tags = fields.texts("tags")
    unknown = [tag for tag in tags if tag not in ("kv_cache", "weights", "cuda_graph")]
    if unknown:
        raise Refusal(f"tags names {unknown[0]!r}, but there are kv_cache, weights and cuda_graph.", param="tags")
    return tags or ("kv_cache", "weights")


def _decoded(part: str) -> bytes:
    try:
        return base64.b64decode(part, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"serialized_named_tensors is not base64: {error}.") from error


def _needed_integer(fields: Fields, name: str, low: int, high: int) -> int:
    value = fields.maybe_integer(name, low=low, high=high)
    if value is None:
        raise fields.refuse(name, "an integer")
    return value


def _announced(fields: Fields, most: int) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Names, formats and shapes of the tensors that are to come."""
    names, kinds, shapes = fields.texts("names"), fields.texts("dtypes"), fields.array("shapes") or []
    if not names or not len(names) == len(kinds) == len(shapes):
        raise malformed("names, dtypes and shapes must be lists of one length, not empty.", "names")
    tensors: list[tuple[str, Any, tuple[int, ...]]] = []
    for name, kind, shape in zip(names, kinds, shapes, strict=True):
        word = kind.removeprefix("torch.")
        if word not in DTYPES:
            raise Refusal(f"dtypes names {kind!r}, but weights are floating-point numbers.", param="dtypes")
        size = Fields({"shapes": shape}).integers("shapes")
        if any(n < 0 for n in size):
            raise fields.refuse("shapes", "lists of sizes")
        tensors.append((name, DTYPES[word], size))
    total = sum(prod(size) * kind.itemsize for _, kind, size in tensors)
    if total > most:
        raise Refusal(f"The tensors announced have {total} bytes together, far more than this model.", param="shapes")
    return tensors
