"""Several policies behind one door of publication: each is given to its own engines when it has a new version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from miles.core.protocols import WeightSync
from miles.core.types import Version


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One policy's way to its engines, and the version its weights are now."""

    sync: WeightSync
    version: Callable[[], Version]


class SeveralSyncs:
    """Implements core.protocols.WeightSync. Versions count each policy's own publications.

    The version given is the main policy's; a policy whose weights have not changed since is not published again.
    """

    def __init__(self, streams: Mapping[str, Stream], main: str) -> None:
        self._streams, self._main = streams, main
        self._live: dict[str, Version] = {}

    async def publish(self, version: Version) -> Mapping[str, float]:
        assert version == self._streams[self._main].version(), "the loop and the main policy's trainer keep step"
        seconds: dict[str, float] = {}
        for name, stream in self._streams.items():
            if self._live.get(name) == (now := stream.version()):
                continue
            for part, taken in (await stream.sync.publish(now)).items():
                seconds[part] = seconds.get(part, 0.0) + taken
            self._live[name] = now
        return seconds
