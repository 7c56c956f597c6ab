"""Between two steps of a run with remote engines: GPUs move, and engines join or leave as ``miles engines`` asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

from miles.backends.remote.remote_engine import RemoteEngine
from miles.core.errors import MilesError, UsageError
from miles.launch.build.policies import PolicySpec
from miles.launch.build.servers import ServerLaunchers
from miles.launch.distributed.resilient_trainer import ResilientTrainer
from miles.launch.elastic.controller import ElasticController, IdleTimer, ObservedJournal
from miles.launch.elastic.engine_registry import EngineRegistry
from miles.launch.elastic.mailbox import ControlReply, ControlRequest, Mailbox
from miles.launch.plan.hardware import count_accelerators
from miles.schedule.device_lease import LeaseWithCallback
from miles.schedule.loop import Planes

# Seconds between two looks into the mailbox.
_POLL_INTERVAL = 0.25


def build_between_steps(
    owner: PolicySpec, servers: RemoteEngine, trainer: ResilientTrainer | None, planes: Planes
) -> tuple[BetweenSteps, Planes]:
    """For the servers of a policy; also the planes that the loop must use then."""
    config, plan, checkpoint = owner.config, owner.plan, owner.checkpoint
    pool = servers.pool
    launchers = ServerLaunchers(
        config,
        plan,
        checkpoint,
        routed_experts=pool.experts is not None,
        indexer_topk=pool.indexer is not None,
    )
    external = bool(config.sglang.rollout_external_engine_addrs)
    registry = EngineRegistry(servers, launchers, planes.journal, external=external)
    locked_reason, elastic = "", None
    if config.elastic.elastic:
        assert trainer is not None, "an elastic run has a distributed trainer"
        locked_reason, idle = "--elastic assigns the GPUs of this run's own servers", IdleTimer(planes.rollout)
        elastic = ElasticController(config, plan.run_dir, registry, trainer, idle, planes.journal)
        planes = replace(planes, rollout=idle, journal=ObservedJournal(planes.journal, elastic.observe))

    def next_index() -> int:
        if locked_reason:
            raise UsageError(f"No server can be started by hand: {locked_reason}; add a running one with --add.")
        index = max(registry.own_servers.values(), default=-1) + 1
        available = None if checkpoint.platform.kind == "cpu" else count_accelerators()
        if available is not None and launchers.get_gpus(index)[-1] >= available:
            raise UsageError(f"No GPU is free for one more server: this machine has {available}.")
        return index

    handler = ControlHandler(plan.run_dir, registry, next_index, locked_reason)
    between_steps = BetweenSteps(handler, elastic)
    return between_steps, replace(planes, lease=LeaseWithCallback(planes.lease, between_steps.run))


class BetweenSteps:
    """``run`` is called between two steps; ``serve`` goes on for the whole run."""

    def __init__(self, handler: ControlHandler, elastic: ElasticController | None) -> None:
        self._handler = handler
        self._elastic = elastic

    async def run(self) -> None:
        self._handler.between_steps()
        if self._elastic is not None:
            await self._elastic.between_steps()

    async def serve(self) -> None:
        await self._handler.serve()

    async def close(self) -> None:
        await self._handler.close()
        if self._elastic is not None:
            await self._elastic.close()


class ControlHandler:
    """Serves ``miles engines``: queries at once, changes between two steps.

    ``next_index`` returns the index of one more server of the run's own; ``locked_reason`` says why its own servers may
    not be removed, if so.
    """

    def __init__(
        self, run_dir: Path, registry: EngineRegistry, next_index: Callable[[], int], locked_reason: str = ""
    ) -> None:
        self._mailbox = Mailbox(run_dir)
        self._registry = registry
        self._next_index = next_index
        self._locked_reason = locked_reason
        self._pending: list[tuple[str, ControlRequest]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Reply to queries, and keep changes for the end of the step."""
        self._mailbox.open()
        while True:
            for name, request in self._mailbox.receive():
                if request.has_changes:
                    self._pending.append((name, request))
                else:
                    self._mailbox.reply(name, ControlReply(engines=self._registry.list_engines()))
            for task in [task for task in self._tasks if task.done()]:
                self._tasks.remove(task)
                task.result()
            await asyncio.sleep(_POLL_INTERVAL)

    def between_steps(self) -> None:
        """Start the pending changes; the reply follows when they are done, and the run goes on meanwhile."""
        while self._pending:
            name, request = self._pending.pop(0)
            self._tasks.add(asyncio.create_task(self._apply(name, request), name=f"request {name}"))

    async def close(self) -> None:
        """Accept no more requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._mailbox.close()

    async def _apply(self, name: str, request: ControlRequest) -> None:
        done: list[str] = []
        problems: list[str] = []
        for change in self._list_changes(request):
            try:
                done.append(await change())
            except UsageError as error:
                problems += error.problems
            except MilesError as error:
                problems.append(f"{str(error).rstrip('.')}.")
        engines = self._registry.list_engines()
        self._mailbox.reply(name, ControlReply(done=tuple(done), problems=tuple(problems), engines=engines))

    def _list_changes(self, request: ControlRequest) -> Iterator[Callable[[], Awaitable[str]]]:
        """Engines join before others leave, so that the last one can be replaced."""
        for address in request.add:
            yield lambda address=address: self._add(address)
        for _ in range(request.add_servers):
            yield self._start
        for name in request.remove:
            yield lambda name=name: self._remove(name)

    async def _add(self, address: str) -> str:
        slot = await self._registry.add_external(address)
        return f"{slot.name} at {address} has joined."

    async def _start(self) -> str:
        slot = await self._registry.start(self._next_index())
        assert slot.client is not None
        return f"{slot.name} was started at {slot.client.url} and has joined."

    async def _remove(self, name: str) -> str:
        slot = self._registry.find_removable(name)
        if self._locked_reason and slot in self._registry.own_servers:
            raise UsageError(f"{name} cannot be removed by hand: {self._locked_reason}.")
        await self._registry.remove(slot)
        return f"{slot.name} has left."
