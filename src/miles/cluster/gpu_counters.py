"""GPU counters of every host of a run (NVML, AMD SMI): utilisation, memory and power, read on demand with one clock.

driver's thread, every --gauge-interval --> this host, and an actor on each other node --> trace/engines.json
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

Counters = Mapping[str, Mapping[str, float]]
"""Values by name, of each GPU by name."""


class RemoteHosts(Protocol):
    """Hosts other than this one: their counters by address, or the sentence why a host has none."""

    def read(self) -> Mapping[str, Counters | str]: ...
    def close(self) -> None: ...


class HostGpuCounters:
    """The counters of this host and of ``remote`` ones; ``note`` gets one sentence for each reason there are none.

    A host that does not answer in time is left out of that sample.
    """

    def __init__(
        self, read_local: Callable[[], Counters | str], remote: RemoteHosts | None, note: Callable[[str], None]
    ) -> None:
        self._read_local = read_local
        self._remote = remote
        self._note = note
        self._stated: set[tuple[str, str]] = set()

    def read(self) -> Counters:
        """Return the counters of each GPU; those of other hosts are named after their address."""
        found = dict(self._select("this host", self._read_local()))
        for address, counters in ({} if self._remote is None else self._remote.read()).items():
            found |= {f"{address} {name}": values for name, values in self._select(address, counters).items()}
        return found

    def close(self) -> None:
        if self._remote is not None:
            self._remote.close()

    def _select(self, host: str, counters: Counters | str) -> Counters:
        if not isinstance(counters, str):
            return counters
        if (host, counters) not in self._stated:
            self._stated.add((host, counters))
            self._note(f"GPU counters are not recorded on {host}: {counters}")
        return {}
