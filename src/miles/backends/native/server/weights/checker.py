"""``/weights_checker``: checksums of the weights, a snapshot to compare them with, and a reset to random numbers.

Checksums are the digests of whole tensors by Hugging Face name, the same that publications verify, so they do not
depend on the number of ranks. A snapshot stores digests and no tensor.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import torch
from aiohttp import web
from torch import Tensor

from miles.backends.native.server.admin_bodies import WeightsCheckerBody
from miles.backends.native.server.generation import json_response
from miles.backends.native.server.request_handler import RequestHandler
from miles.backends.native.server.weights.update import WeightUpdater, list_tensors
from miles.core.errors import SyncError
from miles.sync.manifest import compute_digests

_SUCCESS = {"success": True, "message": "Success."}
_MAX_NAMED = 16


class WeightsChecker:
    """One endpoint with SGLang's actions."""

    def __init__(self, handler: RequestHandler, *, num_ranks: int) -> None:
        self._handler = handler
        self._engine = handler.engine
        self._updater = WeightUpdater(handler.engine, num_ranks)
        self._snapshot: Mapping[str, int] | None = None

    async def check(self, body: WeightsCheckerBody) -> web.Response:
        match body.action:
            case "checksum" | "":
                return json_response({**_SUCCESS, **_format_checksums(await asyncio.to_thread(self._digests))})
            case "snapshot":
                self._snapshot = await asyncio.to_thread(self._digests)
            case "compare":
                difference = self._compare(await asyncio.to_thread(self._digests))
                if difference is not None:
                    return _failure(difference)
            case "reset_tensors":
                try:
                    await self._reset()
                except SyncError as error:
                    return _failure(str(error))
            case _:
                return _failure(f"Unsupported action={body.action!r}")
        return json_response(_SUCCESS)

    def _tensors(self) -> dict[str, Tensor]:
        return list_tensors(self._engine.spec, self._engine.weights())

    def _digests(self) -> dict[str, int]:
        return compute_digests(self._tensors())

    def _compare(self, digests: Mapping[str, int]) -> str | None:
        if self._snapshot is None:
            return "There is no snapshot to compare with; take one first (action snapshot)."
        changed = [name for name in digests if digests[name] != self._snapshot.get(name)]
        if not changed:
            return None
        more = f"\nand {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        return "check tensor equality failed:\n" + "\n".join(f"name={name}" for name in changed[:_MAX_NAMED]) + more

    async def _reset(self) -> None:
        """Random weights, so that whatever is not overwritten later shows; the label stays."""
        handler, label = self._handler, self._handler.weight_version
        async with handler.lock.acquire_write(immediate=self._engine.is_paused):
            noise = await asyncio.to_thread(
                lambda: {name: _build_noise(tensor) for name, tensor in self._tensors().items()}
            )
            handler.labels.set(await self._updater.update_from_tensors(noise), label)


def _build_noise(tensor: Tensor) -> Tensor:
    if not tensor.is_floating_point():  # packed values
        limits = torch.iinfo(tensor.dtype)
        return torch.randint(limits.min, limits.max + 1, tensor.shape, device=tensor.device, dtype=tensor.dtype)
    return torch.rand(tensor.shape, device=tensor.device, dtype=torch.float32).to(tensor.dtype)


def _format_checksums(digests: Mapping[str, int]) -> dict[str, object]:
    """SGLang's checksums: of each tensor, of the device, of the engine."""
    checksums = {name: f"{digest:016x}" for name, digest in digests.items()}
    device = hashlib.sha256("".join(f"{name}{checksums[name]}" for name in sorted(checksums)).encode()).hexdigest()
    parallelism: dict[str, int] = {}
    for dimension in ("tp", "dp", "pp"):
        parallelism |= {f"{dimension}_rank": 0, f"{dimension}_size": 1}
    rank = {
        "checksums": checksums,
        "per_gpu_checksum": device,
        "parallelism_info": {**parallelism, "rank": 0, "size": 1},
    }
    return {"ranks": [rank], "per_engine_checksum": hashlib.sha256(device.encode()).hexdigest()}


def _failure(message: str) -> web.Response:
    return json_response({"success": False, "message": message}, 400)
