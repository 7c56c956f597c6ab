"""A publication: begin, tensors, commit; all engines flip to the new version or none does.

Transports differ only in what they hand to ``Receiver.receive``: ``shared`` the trainer's very
tensor (same process, planes take turns: no byte moves), ``copy`` a copy of it (same process, planes
overlap: the trainer may go on writing its own), ``made`` one that was made for the engine, as in another precision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from miles.cluster.local import Run
from miles.core.errors import SyncError
from miles.core.types import Version
from miles.sync.manifest import Receiver, manifest_of
from miles.sync.resident import Counted

Transport = Literal["shared", "copy", "made"]


def shared(tensor: Tensor) -> Tensor:
    """The trainer's own storage."""
    return tensor.detach()


def copied(tensor: Tensor) -> Tensor:
    """Storage of the engine's own."""
    return tensor.detach().clone()


TRANSPORTS: Mapping[str, Callable[[Tensor], Tensor]] = {"shared": shared, "copy": copied, "made": shared}


class Publication:
    """Implements core.protocols.WeightSync for engines in this process.

    ``moving``: names of the weights that alone are ever written to; the others are shared whatever the transport.
    """

    def __init__(
        self,
        *,
        weights: Callable[[], Mapping[str, Tensor]],
        engines: Sequence[Receiver],
        transport: Transport,
        run: Run,
        moving: Collection[str] | None = None,
    ) -> None:
        self._weights = weights
        self._engines = tuple(engines)
        self._carry = TRANSPORTS[transport]
        # What was made for the publication is one engine's own where there is one.
        self._own = transport == "copy" or (transport == "made" and len(self._engines) == 1)
        self._run, self._moving = run, moving
        self._counted = Counted()

    async def publish(self, version: Version) -> Mapping[str, float]:
        """Give every engine the weights as they are now; returns wall-clock readings."""
        return await self._run(lambda: self._transaction(version))

    def _transaction(self, version: Version) -> Mapping[str, float]:
        started = time.perf_counter()
        with torch.no_grad():
            tensors = self._weights()
            manifest = manifest_of(version, tensors, self._counted.digests(tensors))
            described = time.perf_counter()
            begun: list[Receiver] = []
            try:
                for engine in self._engines:
                    engine.begin(manifest)
                    begun.append(engine)
                    for name, tensor in tensors.items():
                        moves = self._moving is None or name in self._moving
                        given = self._carry(tensor) if moves else shared(tensor)
                        engine.receive(name, given, own=moves and self._own)
                for engine in self._engines:
                    engine.verify()
            except SyncError:
                for engine in begun:
                    engine.rollback()
                raise
            for engine in self._engines:
                engine.commit()
        return {"publish/describe": described - started, "publish/transfer": time.perf_counter() - described}
