"""Ray placement groups: join a cluster and hold the resources of a run until it ends.

One group per trainer node, engine and worker, each on one node (STRICT_PACK): Ray reserves all devices of a group or
none. Engines that share the trainer's devices are in the trainer's groups, with a fraction of each device.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from miles.cluster.ray.placement import ClusterNode, Placement, ResourceRequest, plan_placement
from miles.core.errors import EngineError, MilesError, TrainerError, UsageError

# Seconds between two checks of a cluster without enough resources.
_POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleRange:
    """Where a process is placed: bundles ``first`` to ``first + count`` of a group, with ``share`` of each device."""

    group: PlacementGroup
    first: int
    count: int
    share: float


class ClusterReservation:
    """The resources of a run. ``close`` releases them, and disconnects from a cluster that was joined here.

    ``returning``: the run had these resources before, so that a cluster that is too small now has lost nodes, and has
    ``seconds`` to get them back. A further ``owner``, another policy of the run, has what is left ``beside`` earlier
    reservations, on any node: the driver is none of its ranks. A cluster that is started here has ``cpus``.
    """

    def __init__(
        self,
        request: ResourceRequest,
        *,
        address: str | None,
        seconds: float,
        returning: bool = False,
        beside: Sequence[ClusterReservation] = (),
        owner: str = "",
        cpus: int = 0,
    ) -> None:
        self.request = request
        self._seconds = seconds
        self._owner = owner
        self._beside = tuple(beside)
        self._connected = _connect(address, request, cpus)
        self._groups: list[PlacementGroup] = []
        self._pending: set[PlacementGroup] = set()
        self._lock = threading.Lock()
        deadline = time.monotonic() + seconds
        try:
            self.driver: str = ray.get_runtime_context().get_node_id()
            placement = self._placement = self._plan(deadline if returning else time.monotonic())
            self._trainer = [self._create_group(request.per_node, id) for id in placement.trainer]
            self._engines = [self._create_group(request.per_engine, id) for id in placement.engines]
            self._workers = [self._create_group(1, id, "CPU") for id in placement.workers]
            self._wait(deadline)
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address of the driver's node."""
        return self.nodes[self.driver].address

    def rank_bundles(self, number: int) -> BundleRange:
        """The bundle of a trainer rank, on another node than before if its node is lost.

        Ranks beyond those that were placed use the devices of ended engines, from the first engine on.
        """
        share = self.request.share
        beyond = number - self.request.nodes * self.request.per_node
        if beyond >= 0:
            engine, first = divmod(beyond, self.request.per_engine)
            group = self._live_group(self._engines, engine, self.request.per_engine, f"rank {number}", TrainerError)
            return BundleRange(group=group, first=first, count=1, share=share)
        node, first = divmod(number, self.request.per_node)
        group = self._live_group(self._trainer, node, self.request.per_node, f"rank {number}", TrainerError)
        return BundleRange(group=group, first=first, count=1, share=share)

    def engine_bundles(self, number: int) -> BundleRange:
        """The bundles of an engine, likewise. A negative number uses devices of the trainer, from its last rank on."""
        count, name = self.request.per_engine, f"engine {number}"
        if number < 0:
            first = self.request.per_node + number * count
            group = self._live_group(self._trainer, 0, self.request.per_node, name, EngineError)
        elif self.request.shared:
            node, first = self.request.engine_bundle(number)
            group = self._live_group(self._trainer, node, self.request.per_node, name, EngineError)
        else:
            first = 0
            group = self._live_group(self._engines, number, count, name, EngineError)
        return BundleRange(group=group, first=first, count=count, share=self.request.share)

    def worker_bundles(self, number: int) -> BundleRange:
        """The bundle of a reward worker, likewise."""
        group = self._live_group(self._workers, number, 1, f"reward worker {number}", EngineError, kind="CPU")
        return BundleRange(group=group, first=0, count=1, share=1.0)

    def count_devices(self) -> Counter[str]:
        """The devices that were reserved on each node."""
        request, kept = self.request, self._placement
        used: Counter[str] = Counter()
        for nodes, size in ((kept.trainer, request.per_node), (kept.engines, request.per_engine)):
            for node in nodes:
                used[node] += size
        if request.kind == "CPU":
            used.update(kept.workers)
        return used

    def list_used_nodes(self) -> list[str]:
        """The ids of the nodes that have ranks or engines now; a node may be named more than once."""
        nodes = (find_group_node(group) for group in (*self._trainer, *self._engines))
        return [node for node in nodes if node is not None]

    def close(self) -> None:
        for group in self._groups:
            remove_placement_group(group)
        self._groups.clear()
        if self._connected:
            ray.shutdown()

    def _live_group(
        self,
        groups: list[PlacementGroup],
        index: int,
        count: int,
        owner: str,
        error: type[MilesError],
        kind: str | None = None,
    ) -> PlacementGroup:
        """One of the groups, created again if its node is lost; waits for resources, with a timeout."""
        with self._lock:
            group = groups[index]
            alive = {node.id for node in list_nodes(self.request.kind)}
            node = find_group_node(group)
            if node not in alive and not (node is None and group in self._pending):
                self._pending.discard(group)
                self._groups.remove(group)
                remove_placement_group(group)
                group = groups[index] = self._create_group(count, None, kind)
                self._pending.add(group)
        # Not under the lock: one that waits for resources does not block the others.
        if not group.wait(self._seconds):
            raise error(f"{owner} has lost its node, and {self._describe_free(count, kind)}")
        with self._lock:
            self._pending.discard(group)
        return group

    def _create_group(self, count: int, node: str | None, kind: str | None = None) -> PlacementGroup:
        bundles = [{kind or self.request.kind: 1.0} for _ in range(count)]
        group = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=node)
        self._groups.append(group)
        return group

    def _plan(self, deadline: float) -> Placement:
        while True:
            self.nodes = {node.id: node for node in list_nodes(self.request.kind)}
            used = sum((other.count_devices() for other in self._beside), Counter[str]())
            free = [replace(node, devices=max(0, node.devices - used[node.id])) for node in self.nodes.values()]
            try:
                return plan_placement(self.request, free, None if self._owner else self.driver, self._owner)
            except UsageError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)

    def _wait(self, deadline: float) -> None:
        """Wait until all groups are reserved, the first one on the driver's node."""
        while True:
            for group in self._groups:
                if not group.wait(max(0.0, deadline - time.monotonic())):
                    total, kind = self.request.total, self.request.kind
                    raise UsageError(
                        f"the Ray cluster has the {total} {kind} this run needs, but others hold them: after "
                        f"{self._seconds:g} s (--ray-placement-timeout) {self._describe_free(total)}; wait for them, "
                        "or ask for less"
                    )
            if self._owner or (node := find_group_node(self._trainer[0])) == self.driver:
                return
            if time.monotonic() >= deadline:
                break
            # A previous process of this run may still hold the driver's node; Ray is about to clean up after it.
            group = self._trainer[0]
            self._groups.remove(group)
            remove_placement_group(group)
            time.sleep(_POLL_SECONDS)
            self._trainer[0] = self._create_group(self.request.per_node, self.driver)
        raise UsageError(
            f"the driver is the first rank of the trainer, but others hold the devices of its node {self.address} (Ray "
            f"assigned {self.nodes[node].address if node in self.nodes else node}); start the run on a free node"
        )

    def _describe_free(self, needed: int, kind: str | None = None) -> str:
        free = int(ray.available_resources().get(kind or self.request.kind, 0))
        return f"{needed} {kind or self.request.kind} on one node are needed while {free} are free in the whole cluster"


def create_actor(bundles: BundleRange, kind: str, cls: type, *args: Any, threads: int = 1) -> ActorHandle[Any]:
    """An actor of class ``cls`` in the first bundle, with its fraction of the device; GPU actors reserve no CPU."""
    resources = {"num_gpus": bundles.share, "num_cpus": 0} if kind == "GPU" else {"num_cpus": bundles.share}
    strategy = PlacementGroupSchedulingStrategy(
        placement_group=bundles.group,
        placement_group_bundle_index=bundles.first,
        placement_group_capture_child_tasks=False,
    )
    actor_class = cast(Any, ray.remote(cls)).options(
        **resources, scheduling_strategy=strategy, max_restarts=0, max_concurrency=threads
    )
    return actor_class.remote(*args)


def list_nodes(kind: str) -> list[ClusterNode]:
    """The live nodes with all their devices of a kind, including reserved ones."""
    return [
        ClusterNode(
            id=node["NodeID"],
            address=node["NodeManagerAddress"],
            devices=int(node["Resources"].get(kind, 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            labels=node.get("Labels") or {},
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def find_group_node(group: PlacementGroup) -> str | None:
    """The node of a group; None if it has none now."""
    table: Mapping[str, Any] = placement_group_table(group)
    return next(iter((table.get("bundles_to_node_id") or {}).values()), None)


def read_device_ids(bundles: BundleRange) -> list[str]:
    """The GPU ids of bundles on their node, read by an actor in each."""
    probes = [
        create_actor(BundleRange(group=bundles.group, first=i, count=1, share=bundles.share), "GPU", _DeviceProbe)
        for i in range(bundles.first, bundles.first + bundles.count)
    ]
    try:
        return [id for ids in ray.get([probe.read_ids.remote() for probe in probes], timeout=120) for id in ids]
    finally:
        for probe in probes:
            ray.kill(probe)


class _DeviceProbe:
    """Reports the device it was assigned."""

    def read_ids(self) -> list[str]:
        return ray.get_runtime_context().get_accelerator_ids()["GPU"]


def first_error_line(error: BaseException) -> str:
    """The first line of an error: Ray's have many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def _connect(address: str | None, request: ResourceRequest, least_cpus: int) -> bool:
    """Connect to the cluster unless this process is connected; returns whether it did."""
    if ray.is_initialized():
        return False
    known = address or os.environ.get("RAY_ADDRESS")
    quiet: dict[str, Any] = {"log_to_driver": False, "configure_logging": False}
    try:
        if known:
            ray.init(address=known, **quiet)
        else:
            cpus = {"num_cpus": max(request.cpus, least_cpus, os.cpu_count() or 1)} if request.kind == "CPU" else {}
            ray.init(address="local", include_dashboard=False, **cpus, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = (str(error).splitlines() or ["no reason"])[0]
        hint = "is it running, and is --ray-address its host:port?"
        if "InvalidAuthToken" in f"{error} {error.__cause__}":
            hint = "it needs a token: set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN unless ~/.ray/auth_token exists"
        raise UsageError(f"cannot join the Ray cluster at {known or 'this machine'}: {reason}; {hint}") from error
    return True
