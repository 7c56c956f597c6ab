"""A publication that a user's own function hears of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from miles.cluster.local import Run
from miles.core.protocols import WeightSync
from miles.core.types import Version


class PostWrite(Protocol):
    """Every engine has the weights of ``version``; ``weights`` gives them by name, put together when it is called."""

    def __call__(self, version: Version, weights: Callable[[], Mapping[str, Tensor]]) -> None: ...


class Announced:
    """A core.protocols.WeightSync that calls ``post_write`` after each publication, before any token is sampled."""

    def __init__(
        self, sync: WeightSync, post_write: PostWrite, *, weights: Callable[[], Mapping[str, Tensor]], run: Run
    ) -> None:
        self._sync, self._post_write, self._weights, self._run = sync, post_write, weights, run

    async def publish(self, version: Version) -> Mapping[str, float]:
        """Publish, and return once the function has."""
        seconds = await self._sync.publish(version)
        await self._run(lambda: self._post_write(version, self._weights))
        return seconds
