"""LoRA adapter endpoints: load from a folder or from tensors, update in place, unload; and their config.

Replies have the fields of SGLang's.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from torch import Tensor

from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.lora import ServedAdapter
from miles.backends.native.server.admin_bodies import LoadLoraBody, LoraTensorsBody, UnloadLoraBody
from miles.backends.native.server.generation import json_response
from miles.backends.native.server.weights.update import load_safetensors
from miles.core.errors import MilesError, SyncError, UsageError
from miles.models.lora.factors import LoraFactors, parse_factors, read_factors

__all__ = ["FROM_TENSORS", "LoraApi", "format_adapters"]

FROM_TENSORS = "__tensor__"
"""SGLang's path of an adapter that came as tensors."""
_PICKLE_REFUSED = (
    "This server unpickles nothing from the network: send load_format 'safetensors' with base64 of a safetensors file."
)


class LoraApi:
    """Each method is one endpoint: the body in, a response out."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine

    async def load(self, body: LoadLoraBody) -> web.Response:
        """Load the adapter of a PEFT folder, or with ``update`` replace the one of that name."""
        folder = Path(body.lora_path)
        return await self._change(lambda: self._apply(body, read_factors(folder, self._engine.spec), folder))

    async def load_from_tensors(self, body: LoraTensorsBody) -> web.Response:
        """Load an adapter from its config and tensors, or with ``update`` replace the one of that name."""

        def load() -> ServedAdapter:
            if body.load_format != "safetensors":
                raise SyncError(_PICKLE_REFUSED)
            files = [body.serialized_tensors] if body.serialized_tensors else body.serialized_named_tensors
            tensors = {name: tensor for text in files for name, tensor in load_safetensors(_decode(text)).items()}
            where = f"the adapter {body.lora_name!r}"
            if body.expected_checksums is not None:
                _verify_checksums(tensors, body.expected_checksums, where)
            return self._apply(body, parse_factors(body.config_dict, tensors, self._engine.spec, where=where), None)

        return await self._change(load)

    async def unload(self, body: UnloadLoraBody) -> web.Response:
        """Remove an adapter; requests that use it end with it."""
        return await self._change(lambda: self._engine.unload_lora(body.lora_name))

    def _apply(self, body: LoadLoraBody | LoraTensorsBody, factors: LoraFactors, folder: Path | None) -> ServedAdapter:
        engine = self._engine
        if body.update and engine.lora is not None and body.lora_name in engine.lora.adapters:
            return engine.update_lora(body.lora_name, factors, folder)
        return engine.load_lora(body.lora_name, factors, pinned=body.pinned, folder=folder)

    async def _change(self, change: Callable[[], ServedAdapter]) -> web.Response:
        try:
            if self._engine.lora is None:
                raise UsageError("this server serves no LoRA adapters; start it with --enable-lora")
            await asyncio.to_thread(change)
        except MilesError as error:
            body = {"success": False, "error_message": str(error), "loaded_adapters": format_adapters(self._engine)}
            return json_response(body, 400)
        return json_response({"success": True, "error_message": None, "loaded_adapters": format_adapters(self._engine)})


def format_adapters(engine: NativeEngine) -> dict[str, dict[str, Any]]:
    """The adapters of an engine in SGLang's fields, and ours: ``version`` and ``rank``."""
    adapters = {} if engine.lora is None else dict(engine.lora.adapters)
    return {
        name: {
            "lora_id": str(adapter.uid),
            "lora_name": name,
            "lora_path": FROM_TENSORS if adapter.folder is None else str(adapter.folder),
            "pinned": adapter.pinned,
            "version": adapter.version,
            "rank": adapter.rank,
        }
        for name, adapter in adapters.items()
    }


def _verify_checksums(tensors: Mapping[str, Tensor], expected: Mapping[str, str], where: str) -> None:
    """Raise unless the SHA-256 of every tensor's bytes is the expected one."""
    names = tensors.keys() ^ expected.keys()
    if names:
        raise SyncError(f"{where} has tensors without a checksum, or the other way round, such as {min(names)}.")
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        if hashlib.sha256(data).hexdigest() != expected[name].lower():
            raise SyncError(f"{where} arrived damaged: {name} has another checksum than it was sent with.")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SyncError(f"serialized_tensors is not base64: {error}.") from error
