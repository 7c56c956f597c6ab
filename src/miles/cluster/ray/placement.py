"""Resource requests of a run and their placement on nodes, computed without Ray.

The driver is the first rank of the trainer, so the trainer's first node is the driver's own. The devices of a trainer
node, and those of an engine, are always on one node. Nodes are sorted by rack and host, so that neighbouring nodes get
neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from miles.core.errors import UsageError

LABELS = ("ray.io/region", "ray.io/availability-zone", "rack", "host")
"""Node labels by which nodes are sorted, before their addresses."""

_FRACTIONS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node of the cluster with ``devices`` of the requested kind, and ``cpus``."""

    id: str
    address: str
    devices: int
    cpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequest:
    """``nodes`` of ``per_node`` devices for the trainer, ``engines`` of ``per_engine`` devices; ``kind`` is GPU or CPU.

    ``shared``: engines are on the trainer's devices. ``workers`` of one CPU each compute rewards.
    """

    kind: str
    nodes: int
    per_node: int
    engines: int
    per_engine: int
    shared: bool
    workers: int = 0

    def __post_init__(self) -> None:
        if self.shared and self.engines and self.per_node % self.per_engine:
            raise UsageError(
                f"--rollout-num-gpus-per-engine {self.per_engine} does not divide --actor-num-gpus-per-node "
                f"{self.per_node}, but an engine that shares the trainer's devices must be on one node; "
                "choose a divisor, or give engines devices of their own with --rollout-num-gpus"
            )

    @property
    def share(self) -> float:
        """The fraction of a device that a rank or an engine reserves; processes on one device have equal fractions."""
        if not self.shared or not self.engines:
            return 1.0
        users = 1 + -(-self.engines * self.per_engine // (self.nodes * self.per_node))
        return _FRACTIONS // users / _FRACTIONS

    @property
    def total(self) -> int:
        """Total number of devices."""
        return self.nodes * self.per_node + (0 if self.shared else self.engines * self.per_engine)

    @property
    def cpus(self) -> int:
        """Total number of CPUs; GPU processes reserve none."""
        return self.workers + (self.total if self.kind == "CPU" else 0)

    def engine_bundle(self, number: int) -> tuple[int, int]:
        """The trainer node of an engine that shares devices, and the first of its devices there."""
        return divmod(number * self.per_engine % (self.nodes * self.per_node), self.per_node)

    def describe(self, *, has_driver: bool = True) -> list[str]:
        """Lines for the plan of a run, of whose ranks the driver is the first, or no one."""
        kind, each = self.kind, f"{self.per_engine} {self.kind}"
        first = ", the first one the driver's" if has_driver else ""
        lines = [f"trainer: {_count(self.nodes, 'node')} of {self.per_node} {kind}{first}"] if self.nodes else []
        if self.engines and self.shared:
            lines.append(
                f"engines: {self.engines} of {each}, on the trainer's devices, {self.share:g} of each per process"
            )
        elif self.engines:
            lines.append(f"engines: {self.engines} of {each} each, one node per engine")
        if self.workers:
            lines.append(f"rewards: {_count(self.workers, 'worker')} of 1 CPU each, spread over the nodes")
        extra = f" and {self.workers} CPU" if self.workers and kind != "CPU" else ""
        return [*lines, f"total: {self.cpus if kind == 'CPU' else self.total} {kind}{extra} of the cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Node ids: of the trainer in the order of ranks, of each engine with devices of its own, and of each worker."""

    trainer: tuple[str, ...]
    engines: tuple[str, ...]
    workers: tuple[str, ...] = ()


def sort_nodes(nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
    """Sort nodes by the labels of rack and host, then by address.

    >>> first = ClusterNode(id="a", address="10.0.0.10", devices=1)
    >>> second = ClusterNode(id="b", address="10.0.0.9", devices=1)
    >>> [node.id for node in sort_nodes([first, second])]
    ['b', 'a']
    """
    return sorted(nodes, key=lambda n: ([n.labels.get(name, "") for name in LABELS], _numeric(n.address), n.id))


def plan_placement(
    request: ResourceRequest, nodes: Sequence[ClusterNode], driver: str | None, owner: str = ""
) -> Placement:
    """Assign nodes to the trainer, engines and workers; raises ``UsageError`` if the cluster is too small.

    The first node is that of the ``driver``; any, if the ``owner`` is a policy of which the driver is no rank.
    """
    ordered = sort_nodes(nodes)
    head = [node for node in ordered if node.id == driver and node.devices >= request.per_node]
    if head or driver is None:
        others = [node for node in ordered if node.id != driver and node.devices >= request.per_node]
        # Taking nodes that fit exactly leaves room for more engines on the others; the rack order is tried first.
        for candidates in (
            others,
            sorted(others, key=lambda node: (node.devices - request.per_node) % request.per_engine),
        ):
            selected = [*head, *candidates][: request.nodes]
            engines = _place_engines(request, ordered, selected)
            if len(selected) == request.nodes and engines is not None:
                trainer = tuple(node.id for node in selected)
                return Placement(
                    trainer=trainer,
                    engines=engines,
                    workers=_place_workers(request, ordered, (*trainer, *engines), driver),
                )
    raise UsageError(_describe_shortage(request, ordered, driver, owner))


def _place_engines(
    request: ResourceRequest, nodes: Sequence[ClusterNode], trainer_nodes: Sequence[ClusterNode]
) -> tuple[str, ...] | None:
    if request.shared:
        return ()
    trainer_ids = {node.id for node in trainer_nodes}
    free = {node.id: node.devices - (request.per_node if node.id in trainer_ids else 0) for node in nodes}
    slots = [id for id, count in free.items() for _ in range(count // request.per_engine)]
    return tuple(slots[: request.engines]) if len(slots) >= request.engines else None


def _place_workers(
    request: ResourceRequest, nodes: Sequence[ClusterNode], used: Sequence[str], driver: str | None
) -> tuple[str, ...]:
    """Assign each worker to the node with the fewest workers among those with a free CPU."""
    free = {node.id: node.cpus for node in nodes}
    if request.kind == "CPU":
        sizes = [request.per_node] * request.nodes + [request.per_engine] * (len(used) - request.nodes)
        free = {node.id: node.devices for node in nodes}
        for id, size in zip(used, sizes, strict=True):
            free[id] -= size
    if sum(free.values()) < request.workers:
        left = ", ".join(f"{n.address}{' (this one)' if n.id == driver else ''} has {free[n.id]}" for n in nodes)
        raise UsageError(
            f"the Ray cluster is too small for this run: --reward-num-workers needs {request.workers} more CPU, but of "
            f"its {_count(len(nodes), 'node')} {left} free ({sum(free.values())} CPU in total); ask for fewer workers, "
            "or add nodes"
        )
    assigned: list[str] = []
    for _ in range(request.workers):
        candidates = [id for id, count in free.items() if count > assigned.count(id)]
        assigned.append(min(candidates, key=assigned.count))
    return tuple(assigned)


def _describe_shortage(request: ResourceRequest, nodes: Sequence[ClusterNode], driver: str | None, owner: str) -> str:
    kind = request.kind
    have = ", ".join(f"{n.address}{' (this one)' if n.id == driver else ''} has {n.devices}" for n in nodes)
    parts: list[str] = []
    if request.nodes:
        whose = "the trainer" if driver is None else "the trainer, this one among them"
        parts.append(f"{_count(request.nodes, 'node')} with {request.per_node} {kind} for {whose}")
    if request.engines and not request.shared:
        parts.append(f"{_count(request.engines, 'engine')} of {request.per_engine} {kind} on one node each")
    needed = ", and ".join(parts)
    who = f"policy {owner}, beside the others," if owner else "it"
    return (
        f"the Ray cluster is too small for this run: {who} needs {needed} ({request.total} {kind} in total), but of "
        f"its {_count(len(nodes), 'node')} {have or 'none is alive'} ({sum(n.devices for n in nodes)} {kind} in "
        "total); ask for less with --actor-num-gpus-per-node, --actor-num-nodes or --rollout-num-gpus, or add nodes"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _numeric(address: str) -> tuple[int, int, str]:
    """A sort key: IP addresses by number, then host names."""
    try:
        parsed = ip_address(address)
    except ValueError:
        return 9, 0, address
    return parsed.version, int(parsed), ""
