"""GPU counters of the nodes of a Ray cluster: an actor on each node that has a rank or an engine of this run.

An actor reserves no device: NVML and AMD SMI show all GPUs of a host to any process.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from miles.cluster.gpu_counters import Counters
from miles.cluster.platform import GpuCounters
from miles.cluster.ray.placement_group import ClusterReservation, list_nodes

_READ_SECONDS = 1.0
_READS_PER_SEARCH = 30


class CountersActor:
    """Reads the counters of its node."""

    def __init__(self) -> None:
        self._counters = GpuCounters()

    def read(self) -> Counters | str:
        return self._counters.read() if self._counters.available else self._counters.why


class RayHostCounters:
    """Implements ``RemoteHosts``. Nodes are searched again every so many reads, since ranks and engines move."""

    def __init__(self, reservation: ClusterReservation) -> None:
        self._reservation = reservation
        self._actors: dict[str, ActorHandle[Any]] = {}
        self._reads = 0

    def read(self) -> Mapping[str, Counters | str]:
        """Return what the nodes answer within a second, by address."""
        if self._reads % _READS_PER_SEARCH == 0:
            self._find_nodes()
        self._reads += 1
        pending = {actor.read.remote(): address for address, actor in self._actors.items()}
        if not pending:
            return {}
        done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=_READ_SECONDS)
        found: dict[str, Counters | str] = {}
        for reference in done:
            try:
                found[pending[reference]] = ray.get(reference, timeout=_READ_SECONDS)
            except RayError:  # its node is lost; the next search replaces it
                self._actors.pop(pending[reference], None)
        return found

    def close(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    def _find_nodes(self) -> None:
        nodes = {node.id: node for node in list_nodes(self._reservation.request.kind)}
        used = [nodes[id] for id in self._reservation.list_used_nodes() if id in nodes]
        # Two nodes of one address are one host, whose GPUs the first actor shows all of.
        addresses = {node.address: node.id for node in used if node.address != self._reservation.address}
        for address in self._actors.keys() - addresses.keys():
            ray.kill(self._actors.pop(address))
        for address, id in addresses.items():
            if address not in self._actors:
                strategy = NodeAffinitySchedulingStrategy(node_id=id, soft=False)
                actor_class = cast(Any, ray.remote(CountersActor)).options(
                    num_cpus=0, num_gpus=0, scheduling_strategy=strategy, max_restarts=0
                )
                self._actors[address] = actor_class.remote()
