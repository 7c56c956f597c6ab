"""Engine registry of a run: engines join and leave under unique names, and the journal records each change."""

from __future__ import annotations

from miles.backends.remote.pool.engine_pool import EngineSlot, SlotState
from miles.backends.remote.remote_engine import RemoteEngine
from miles.core.errors import EngineError, UsageError
from miles.core.events import EngineJoined, EngineLeft
from miles.core.protocols import Observer
from miles.launch.build.servers import ServerLaunchers, normalize_url
from miles.launch.elastic.mailbox import EngineRow

EXTERNAL_TIMEOUT = 10.0
"""Seconds that a server named by --add may take to answer."""

_NO_ADDRESS = "(starting)"


class EngineRegistry:
    """``own_servers`` has the GPU index of each server that the run started (see ``ServerLaunchers.own``)."""

    def __init__(self, servers: RemoteEngine, launchers: ServerLaunchers, journal: Observer, *, external: bool) -> None:
        self._servers = servers
        self._launchers = launchers
        self._journal = journal
        slots = servers.pool.slots
        self._num_names = len(slots)
        self.own_servers: dict[EngineSlot, int] = {} if external else {slot: i for i, slot in enumerate(slots)}

    async def add_external(self, address: str) -> EngineSlot:
        """Add a running server."""
        url = normalize_url(address)
        if any(_get_address(slot) == url for slot in self._servers.pool.slots):
            raise UsageError(f"{url} is an engine of this run already.")
        name = self._make_name()
        server = self._launchers.external(name, url, seconds=EXTERNAL_TIMEOUT)
        return self._record_joined(await self._servers.add(name, server))

    async def start(self, index: int) -> EngineSlot:
        """Start a server on the GPUs of ``index``."""
        name = self._make_name()
        slot = await self._servers.add(name, self._launchers.own(name, index))
        self.own_servers[slot] = index
        return self._record_joined(slot)

    async def remove(self, slot: EngineSlot) -> None:
        """Remove a server; its requests finish there or continue elsewhere."""
        address = _get_address(slot)
        self.own_servers.pop(slot, None)
        await self._servers.remove(slot)
        self._journal(EngineLeft(name=slot.name, address=address))

    def find_removable(self, name: str) -> EngineSlot:
        """The engine with that name or address; raises where there is none, or where it is the last one."""
        wanted = (name, normalize_url(name))
        slots = [slot for slot in self._servers.pool.slots if slot.name in wanted or _get_address(slot) in wanted]
        if not slots:
            raise UsageError(f"{name} is not an engine of this run; miles engines without flags lists them.")
        slot = slots[0]
        if slot.state is SlotState.DRAINING:
            raise UsageError(f"{name} is leaving already.")
        if not any(other.state is SlotState.SERVING for other in self._servers.pool.slots if other is not slot):
            raise UsageError(f"{name} is the last serving engine of the run; add another first.")
        return slot

    def list_engines(self) -> tuple[EngineRow, ...]:
        """All engines in their current state."""
        return tuple(
            EngineRow(
                name=slot.name,
                address=_get_address(slot),
                state=slot.state,
                version=None if slot.version is None else slot.version.number,
                load=slot.load,
                why=slot.why,
            )
            for slot in self._servers.pool.slots
        )

    def _make_name(self) -> str:
        """A name that no engine had: it also names a log file."""
        self._num_names += 1
        return f"engine {self._num_names - 1}"

    def _record_joined(self, slot: EngineSlot) -> EngineSlot:
        if slot.version is None:
            raise EngineError(f"{slot.name} joined before there were weights for it")
        self._journal(EngineJoined(name=slot.name, address=_get_address(slot), version=slot.version))
        return slot


def _get_address(slot: EngineSlot) -> str:
    return _NO_ADDRESS if slot.client is None else slot.client.url
