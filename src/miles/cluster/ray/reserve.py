"""A Ray cluster joined, and what a run asks of it held in placement groups until it ends.

A group a node of the trainer, an engine and a worker, each on one node (STRICT_PACK): Ray holds all devices of one or
none. Where engines share the trainer's devices they are in the trainer's groups, with a share of each device.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.cluster.ray.placement import Need, Node, Placement, place
from miles.core.errors import EngineError, MilesError, TrainerError, UsageError

# Seconds between two looks at a cluster that has no room yet.
_LOOK = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a process goes: bundles ``first`` to ``first + count`` of a group, with ``share`` of each device."""

    group: PlacementGroup
    first: int
    count: int
    share: float


class Reserved:
    """What a run has of the cluster. ``close`` gives it back, and leaves a cluster that was joined here.

    ``returning``: the run has been there before, so that a cluster that is too small now has lost nodes, and is given
    ``seconds`` to get them back.
    """

    def __init__(self, need: Need, *, address: str | None, seconds: float, returning: bool = False) -> None:
        self.need, self._seconds = need, seconds
        self._joined = _join(address, need)
        self._groups: list[PlacementGroup] = []
        self._pending: set[PlacementGroup] = set()
        self._turn = threading.Lock()
        deadline = time.monotonic() + seconds
        try:
            self.driver: str = ray.get_runtime_context().get_node_id()
            placed = self._placed(deadline if returning else time.monotonic())
            self._trainer = [self._hold(need.per_node, id) for id in placed.trainer]
            self._engines = [self._hold(need.per_engine, id) for id in placed.engines]
            self._workers = [self._hold(1, id, "CPU") for id in placed.workers]
            self._wait(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The driver's own, as other nodes reach it."""
        return self.nodes[self.driver].address

    def rank(self, number: int) -> Spot:
        """Where a rank of the trainer goes; elsewhere than before when the node it was on is gone.

        Ranks beyond those that were placed have devices of engines, from the first engine's on, which have ended.
        """
        beyond = number - self.need.nodes * self.need.per_node
        if beyond >= 0:
            at, first = divmod(beyond, self.need.per_engine)
            group = self._standing(self._engines, at, self.need.per_engine, f"rank {number}", TrainerError)
            return Spot(group=group, first=first, count=1, share=self.need.share)
        node, first = divmod(number, self.need.per_node)
        group = self._standing(self._trainer, node, self.need.per_node, f"rank {number}", TrainerError)
        return Spot(group=group, first=first, count=1, share=self.need.share)

    def engine(self, number: int) -> Spot:
        """Where an engine goes; likewise. Below 0 it has devices of the trainer's, from its last ranks' on."""
        count, name = self.need.per_engine, f"engine {number}"
        if number < 0:
            first = self.need.per_node + number * count
            group = self._standing(self._trainer, 0, self.need.per_node, name, EngineError)
        elif self.need.shared:
            node, first = self.need.bundle_of_engine(number)
            group = self._standing(self._trainer, node, self.need.per_node, name, EngineError)
        else:
            group, first = self._standing(self._engines, number, count, name, EngineError), 0
        return Spot(group=group, first=first, count=count, share=self.need.share)

    def worker(self, number: int) -> Spot:
        """Where a worker that computes rewards goes; likewise."""
        group = self._standing(self._workers, number, 1, f"reward worker {number}", EngineError, kind="CPU")
        return Spot(group=group, first=0, count=1, share=1.0)

    def close(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        if self._joined:
            ray.shutdown()

    def _standing(
        self,
        groups: list[PlacementGroup],
        at: int,
        count: int,
        whose: str,
        error: type[MilesError],
        kind: str | None = None,
    ) -> PlacementGroup:
        """One of the groups, made anew where its node is gone; waits for room, with a deadline."""
        with self._turn:
            group = groups[at]
            alive = {node.id for node in nodes_of(self.need.kind)}
            found = node_of(group)
            if found not in alive and not (found is None and group in self._pending):
                self._pending.discard(group)
                self._groups.remove(group)
                remove_placement_group(group)
                group = groups[at] = self._hold(count, None, kind)
                self._pending.add(group)
        # Others ask meanwhile, and one who waits for room keeps none from them.
        if not group.wait(self._seconds):
            raise error(f"{whose} has lost its node, and {self._left(count, kind)}")
        with self._turn:
            self._pending.discard(group)
        return group

    def _hold(self, count: int, node: str | None, kind: str | None = None) -> PlacementGroup:
        bundles = [{kind or self.need.kind: 1.0} for _ in range(count)]
        group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=node)
        self._groups.append(group)
        return group

    def _placed(self, deadline: float) -> Placement:
        while True:
            self.nodes = {node.id: node for node in nodes_of(self.need.kind)}
            try:
                return place(self.need, list(self.nodes.values()), self.driver)
            except UsageError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_LOOK)

    def _wait(self, deadline: float) -> None:
        """All is there at once, or nothing is kept."""
        while True:
            for group in self._groups:
                if not group.wait(max(0.0, deadline - time.monotonic())):
                    raise UsageError(
                        f"the Ray cluster has the {self.need.total} {self.need.kind} this run needs, but others hold "
                        f"them: after {self._seconds:g} s (--ray-placement-timeout) {self._left(self.need.total)}; "
                        "wait for them, or ask for less"
                    )
            if (found := node_of(self._trainer[0])) == self.driver:
                return
            if time.monotonic() >= deadline:
                break
            # Whoever holds the driver's node may be a life before this one, which Ray is about to clear away.
            group = self._trainer[0]
            self._groups.remove(group)
            remove_placement_group(group)
            time.sleep(_LOOK)
            self._trainer[0] = self._hold(self.need.per_node, self.driver)
        here = self.nodes[self.driver].address
        raise UsageError(
            f"the driver is the first rank that trains, and others hold the devices of its node {here} (Ray gave "
            f"{self.nodes[found].address if found in self.nodes else found}); start the run on a node that is free"
        )

    def _left(self, wanted: int, kind: str | None = None) -> str:
        free = int(ray.available_resources().get(kind or self.need.kind, 0))
        return f"{wanted} {kind or self.need.kind} on one node are wanted while {free} are free in the whole cluster"


def actor_at(spot: Spot, kind: str, made: type, *arguments: Any, threads: int = 1) -> ActorHandle[Any]:
    """An actor of the class ``made`` there: with its share of the first device, and no CPU beside it."""
    wanted = {"num_gpus": spot.share, "num_cpus": 0} if kind == "GPU" else {"num_cpus": spot.share}
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=spot.group, placement_group_bundle_index=spot.first, placement_group_capture_child_tasks=False
    )
    how = cast(Any, ray.remote(made)).options(
        **wanted, scheduling_strategy=strategy, max_restarts=0, max_concurrency=threads
    )
    return how.remote(*arguments)


def nodes_of(kind: str) -> list[Node]:
    """The nodes that are alive, with all their devices of a kind, also those that are taken."""
    return [
        Node(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            devices=int(node["Resources"].get(kind, 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def node_of(group: PlacementGroup) -> str | None:
    """Where a group was put; None where it is nowhere just now."""
    table: Mapping[str, Any] = placement_group_table(group)
    return next(iter((table.get("bundles_to_node_id") or {}).values()), None)


def device_ids(spot: Spot) -> list[str]:
    """The devices of a spot, by their numbers on their node: a visitor with a share of each says which it got."""
    visits = [
        actor_at(Spot(group=spot.group, first=i, count=1, share=spot.share), "GPU", _Visitor)
        for i in range(spot.first, spot.first + spot.count)
    ]
    try:
        return [id for ids in ray.get([visit.devices.remote() for visit in visits], timeout=120) for id in ids]
    finally:
        for visit in visits:
            ray.kill(visit)


class _Visitor:
    """Looks at the device it was given."""

    def devices(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def _join(address: str | None, need: Need) -> bool:
    """Connect, unless this process is; did it happen here?"""
    if ray.is_initialized():
        return False
    known = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    try:
        if known:
            ray.init(address=known, **quiet)
        else:
            more = {"num_cpus": max(need.cpus, os.cpu_count() or 1)} if need.kind == "CPU" else {}
            ray.init(address="local", include_dashboard=False, **more, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        said = (str(error).splitlines() or ["no reason"])[0]
        mend = "is it running, and is --ray-address its host:port?"
        if "InvalidAuthToken" in f"{error} {error.__cause__}":
            mend = "it asks for a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless ~/.ray/auth_token is there"
        raise UsageError(f"the Ray cluster at {known or 'this machine'} cannot be joined: {said}; {mend}") from error
    return True
