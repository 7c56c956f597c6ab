"""``/weights_checker``: checksums of the weights there are, a snapshot to compare them with, and noise for weights.

Checksums are the digests of whole tensors by their Hugging Face names, those that publications are proven by, so they
do not depend on how many ranks share the model. A snapshot keeps digests and no tensor.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import torch
from aiohttp import web
from torch import Tensor

from miles.backends.native.server.control import json_reply
from miles.backends.native.server.desk import Desk
from miles.backends.native.server.fields import Fields
from miles.backends.native.server.weights import Intake, all_by_name
from miles.core.errors import SyncError
from miles.models import names
from miles.models.foreign.spec import ForeignSpec
from miles.sync.manifest import digests

_DONE = {"success": True, "message": "Success."}
_MOST_NAMED = 16


class Checker:
    """One endpoint, by its actions."""

    def __init__(self, desk: Desk, *, ranks: int) -> None:
        self._desk, self._engine = desk, desk.engine
        self._intake = Intake(desk.engine, ranks)
        self._snapshot: Mapping[str, int] | None = None

    async def check(self, fields: Fields) -> web.Response:
        """SGLang's actions; without one, checksums."""
        match action := fields.text("action") or "checksum":
            case "checksum":
                return json_reply({**_DONE, **_told(await asyncio.to_thread(self._digests))})
            case "snapshot":
                self._snapshot = await asyncio.to_thread(self._digests)
            case "compare":
                why = self._difference(await asyncio.to_thread(self._digests))
                if why is not None:
                    return _failed(why)
            case "reset_tensors":
                try:
                    await self._reset()
                except SyncError as error:
                    return _failed(str(error))
            case _:
                return _failed(f"Unsupported action={action!r}")
        return json_reply(_DONE)

    def _tensors(self) -> dict[str, Tensor]:
        """All weights by their Hugging Face names, each once."""
        spec, current = self._engine.spec, self._engine.weights()
        if isinstance(spec, ForeignSpec):
            return {name: tensor.detach() for name, tensor in current.items()}
        theirs = [piece.hf_name for pieces in names.pieces(spec).values() for piece in pieces]
        return all_by_name(spec, current, theirs)

    def _digests(self) -> dict[str, int]:
        return digests(self._tensors())

    def _difference(self, found: Mapping[str, int]) -> str | None:
        if self._snapshot is None:
            return "There is no snapshot to compare with; take one first (action snapshot)."
        other = [name for name in found if found[name] != self._snapshot.get(name)]
        if not other:
            return None
        more = f"\nand {len(other) - _MOST_NAMED} more" if len(other) > _MOST_NAMED else ""
        return "check tensor equality failed:\n" + "\n".join(f"name={name}" for name in other[:_MOST_NAMED]) + more

    async def _reset(self) -> None:
        """Noise for weights, so that whatever is not written over later shows; called by the name of those before."""
        desk, label = self._desk, self._desk.labels.of(self._engine.version)
        async with desk.gate.closed(at_once=self._engine.resting):
            noise = await asyncio.to_thread(lambda: {name: _noise(tensor) for name, tensor in self._tensors().items()})
            desk.labels.put(await self._intake.from_tensors(noise), label)


def _noise(tensor: Tensor) -> Tensor:
    return torch.rand(tensor.shape, device=tensor.device, dtype=torch.float32).to(tensor.dtype)


def _told(found: Mapping[str, int]) -> dict[str, object]:
    """As SGLang writes checksums: of each tensor, of the device, of the engine."""
    sums = {name: f"{number:016x}" for name, number in found.items()}
    device = hashlib.sha256("".join(f"{name}{sums[name]}" for name in sorted(sums)).encode()).hexdigest()
    alone = {f"{kind}_{word}": n for kind in ("tp", "dp", "pp") for word, n in (("rank", 0), ("size", 1))}
    rank = {
        "checksums": sums,
        "per_gpu_checksum": device,
        "parallelism_info": {**alone, "rank": 0, "size": 1},
    }
    return {"ranks": [rank], "per_engine_checksum": hashlib.sha256(device.encode()).hexdigest()}


def _failed(message: str) -> web.Response:
    return json_reply({"success": False, "message": message}, 400)
