"""What is done between two steps of a run whose engines are servers: devices move, engines asked for join and leave."""

from __future__ import annotations

from dataclasses import replace

from miles.backends.sglang.servers import Servers
from miles.core.errors import UsageError
from miles.launch.company import Enrolled
from miles.launch.desk import Desk
from miles.launch.elastic import Elastic, Idleness, Overheard
from miles.launch.homes import Homes
from miles.launch.machine import accelerator_count
from miles.launch.mending import MendedTrainer
from miles.launch.roster import Roster
from miles.launch.trainer import Trains
from miles.schedule.lease import Attended
from miles.schedule.loop import Planes


class Attending:
    """``look`` is for between two steps, ``attend`` for as long as the run goes on."""

    def __init__(self, desk: Desk, elastic: Elastic | None) -> None:
        self._desk, self._elastic = desk, elastic

    async def look(self) -> None:
        self._desk.between_steps()
        if self._elastic is not None:
            await self._elastic.between_steps()

    async def attend(self) -> None:
        await self._desk.attend()

    async def close(self) -> None:
        await self._desk.close()
        if self._elastic is not None:
            await self._elastic.close()


def attended(owner: Enrolled, servers: Servers, trainer: Trains, planes: Planes) -> tuple[Attending, Planes]:
    """For the engines of a policy; the planes are those the loop is to have then."""
    config, plan, policy = owner.config, owner.plan, owner.policy
    homes = Homes(config, plan, policy, routed=servers.fleet.experts is not None)
    addresses = config.sglang.rollout_external_engine_addrs
    roster = Roster(servers, homes, planes.journal, visited=bool(addresses))
    fixed, elastic = "", None
    if config.bounds.elastic:
        assert isinstance(trainer, MendedTrainer)
        fixed, idleness = "--elastic deals out the devices of this run's own servers", Idleness(planes.rollout)
        elastic = Elastic(config, plan.run_dir, roster, trainer, idleness, planes.journal)
        planes = replace(planes, rollout=idleness, journal=Overheard(planes.journal, elastic.hear))

    def next_number() -> int:
        if fixed:
            raise UsageError(f"No server can be started by hand: {fixed}; have one that runs already join with --add.")
        number = max(roster.numbers.values(), default=-1) + 1
        there = None if policy.platform.kind == "cpu" else accelerator_count()
        if there is not None and homes.devices(number)[-1] >= there:
            raise UsageError(f"No device is free for one more server: this machine has {there}.")
        return number

    attending = Attending(Desk(plan.run_dir, roster, next_number, fixed), elastic)
    return attending, replace(planes, lease=Attended(planes.lease, attending.look))
