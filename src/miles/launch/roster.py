"""Who samples for a run: engines join and leave under names of their own, each change told to the journal."""

from __future__ import annotations

from miles.backends.sglang.fleet import Seat, State
from miles.backends.sglang.servers import Servers
from miles.core.errors import EngineError, UsageError
from miles.core.events import EngineJoined, EngineLeft
from miles.core.protocols import Observer
from miles.launch.homes import Homes, url_of
from miles.launch.requests import EngineRow

VISIT_SECONDS = 10.0
"""How long a server that is said to run already may take to answer."""

_NOWHERE = "(starting)"


class Roster:
    """``numbers`` has, of the servers that the run started itself, which devices each has (see ``Homes.own``)."""

    def __init__(self, servers: Servers, homes: Homes, journal: Observer, *, visited: bool) -> None:
        self._servers, self._homes, self._journal = servers, homes, journal
        seats = servers.fleet.seats
        self._named = len(seats)
        self.numbers: dict[Seat, int] = {} if visited else {seat: i for i, seat in enumerate(seats)}

    async def visit(self, address: str) -> Seat:
        """Have a server that runs already join."""
        url = url_of(address)
        if any(_address(seat) == url for seat in self._servers.fleet.seats):
            raise UsageError(f"{url} is an engine of this run already.")
        name = self._name()
        return self._joined(await self._servers.add(name, self._homes.visited(name, url, seconds=VISIT_SECONDS)))

    async def start(self, number: int) -> Seat:
        """Start a server on the devices of ``number``."""
        name = self._name()
        seat = await self._servers.add(name, self._homes.own(name, number))
        self.numbers[seat] = number
        return self._joined(seat)

    async def leave(self, seat: Seat) -> None:
        """Have a server leave: what it has under way ends there or goes on elsewhere."""
        address = _address(seat)
        self.numbers.pop(seat, None)
        await self._servers.remove(seat)
        self._journal(EngineLeft(name=seat.name, address=address))

    def found(self, called: str) -> Seat:
        """The engine at that address, or of that name; refuses where there is none, or no other would be left."""
        wanted = (called, url_of(called))
        seats = [seat for seat in self._servers.fleet.seats if seat.name in wanted or _address(seat) in wanted]
        if not seats:
            raise UsageError(f"{called} is no engine of this run; miles engines without flags lists them.")
        seat = seats[0]
        if seat.state is State.LEAVING:
            raise UsageError(f"{called} is leaving already.")
        if not any(other.state is State.SERVING for other in self._servers.fleet.seats if other is not seat):
            raise UsageError(f"{called} is the last engine that answers, and the run needs one; add another first.")
        return seat

    def rows(self) -> tuple[EngineRow, ...]:
        """Everyone, as they are now."""
        return tuple(
            EngineRow(
                name=seat.name,
                address=_address(seat),
                state=seat.state,
                version=None if seat.version is None else seat.version.number,
                load=seat.load,
                why=seat.why,
            )
            for seat in self._servers.fleet.seats
        )

    def _name(self) -> str:
        """One that nobody had: it names a log too."""
        self._named += 1
        return f"engine {self._named - 1}"

    def _joined(self, seat: Seat) -> Seat:
        if seat.version is None:
            raise EngineError(f"{seat.name} joined before there were weights to give it")
        self._journal(EngineJoined(name=seat.name, address=_address(seat), version=seat.version))
        return seat


def _address(seat: Seat) -> str:
    return _NOWHERE if seat.client is None else seat.client.url
