"""What of a cluster a run asks for, and on which nodes it goes: arithmetic over numbers of devices, without Ray.

The driver is the first rank that trains, so the first node of the trainer is the driver's own. The devices of a node
of the trainer, and those of an engine, are always on one node. Nodes stand in the order of their racks and hosts, so
that neighbours get neighbouring ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

from miles.core.errors import UsageError

LABELS = ("ray.io/region", "ray.io/availability-zone", "rack", "host")
"""By which labels of theirs nodes are ordered, before their addresses."""

_SHARES = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster with ``devices`` of the kind that is asked for, and ``cpus`` beside them."""

    id: str
    address: str
    devices: int
    cpus: int = 0
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """``nodes`` of ``per_node`` devices train, ``engines`` of ``per_engine`` devices sample; ``kind`` is GPU or CPU.

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
                f"{self.per_node}, and an engine that shares the trainer's devices has all of its own on one node; "
                "choose a divisor, or give engines devices of their own with --rollout-num-gpus"
            )

    @property
    def share(self) -> float:
        """How much of a device a rank or an engine takes: all of it, or as much as each of those that are on it."""
        if not self.shared or not self.engines:
            return 1.0
        users = 1 + -(-self.engines * self.per_engine // (self.nodes * self.per_node))
        return _SHARES // users / _SHARES

    @property
    def total(self) -> int:
        """Devices, all in all."""
        return self.nodes * self.per_node + (0 if self.shared else self.engines * self.per_engine)

    @property
    def cpus(self) -> int:
        """CPUs, all in all, of which an accelerator needs none."""
        return self.workers + (self.total if self.kind == "CPU" else 0)

    def bundle_of_engine(self, number: int) -> tuple[int, int]:
        """Of an engine that shares: on which node of the trainer, and from which of its devices on."""
        return divmod(number * self.per_engine % (self.nodes * self.per_node), self.per_node)

    def lines(self) -> list[str]:
        """The same for people."""
        k, each = self.kind, f"{self.per_engine} {self.kind}"
        out = [f"trainer: {_count(self.nodes, 'node')} of {self.per_node} {k}, the first of them the driver's own"]
        if self.engines and self.shared:
            out.append(f"engines: {self.engines} of {each}, on the trainer's devices, {self.share:g} of each a process")
        elif self.engines:
            out.append(f"engines: {self.engines} of {each} each, all of an engine's on one node")
        if self.workers:
            out.append(f"rewards: {_count(self.workers, 'worker')} of 1 CPU each, spread over the nodes")
        beside = f" and {self.workers} CPU" if self.workers and k != "CPU" else ""
        return [*out, f"together {self.cpus if k == 'CPU' else self.total} {k}{beside} of the cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The ids of the nodes: of the trainer's in the order of ranks, of each engine that has its own devices, and of
    each worker."""

    trainer: tuple[str, ...]
    engines: tuple[str, ...]
    workers: tuple[str, ...] = ()


def ordered(nodes: Sequence[Node]) -> list[Node]:
    """By rack and host as their labels say, then by address.

    >>> one, two = Node(id="a", address="10.0.0.10", devices=1), Node(id="b", address="10.0.0.9", devices=1)
    >>> [node.id for node in ordered([one, two])]
    ['b', 'a']
    """
    return sorted(nodes, key=lambda n: ([n.labels.get(name, "") for name in LABELS], _numeric(n.address), n.id))


def place(need: Need, nodes: Sequence[Node], driver: str) -> Placement:
    """Where everything goes; refuses (UsageError), with the numbers, what the cluster has no room for."""
    line = ordered(nodes)
    first = next((node for node in line if node.id == driver), None)
    if first is not None and first.devices >= need.per_node:
        others = [node for node in line if node.id != driver and node.devices >= need.per_node]
        # Full nodes first leaves more whole engines on the others; the order of racks is preferred.
        for candidates in (others, sorted(others, key=lambda node: (node.devices - need.per_node) % need.per_engine)):
            taken = [first, *candidates[: need.nodes - 1]]
            engines = _engines(need, line, taken)
            if len(taken) == need.nodes and engines is not None:
                trainer = tuple(node.id for node in taken)
                return Placement(
                    trainer=trainer, engines=engines, workers=_workers(need, line, (*trainer, *engines), driver)
                )
    raise UsageError(_refusal(need, line, driver))


def _engines(need: Need, line: Sequence[Node], taken: Sequence[Node]) -> tuple[str, ...] | None:
    if need.shared:
        return ()
    at = {node.id for node in taken}
    rooms = {node.id: node.devices - (need.per_node if node.id in at else 0) for node in line}
    slots = [id for id, room in rooms.items() for _ in range(room // need.per_engine)]
    return tuple(slots[: need.engines]) if len(slots) >= need.engines else None


def _workers(need: Need, line: Sequence[Node], used: Sequence[str], driver: str) -> tuple[str, ...]:
    """One after the other to the node that has the fewest of them, of those with a CPU left."""
    rooms = {node.id: node.cpus for node in line}
    if need.kind == "CPU":
        sizes = [need.per_node] * need.nodes + [need.per_engine] * (len(used) - need.nodes)
        rooms = {node.id: node.devices for node in line}
        for id, size in zip(used, sizes, strict=True):
            rooms[id] -= size
    if sum(rooms.values()) < need.workers:
        left = ", ".join(f"{n.address}{' (this one)' if n.id == driver else ''} has {rooms[n.id]}" for n in line)
        raise UsageError(
            f"the Ray cluster cannot hold this run: beside all else it needs {need.workers} CPU for the workers of "
            f"--reward-num-workers, and of what is left on its {_count(len(line), 'node')} {left} "
            f"({sum(rooms.values())} CPU together); ask for fewer workers, or add nodes"
        )
    given: list[str] = []
    for _ in range(need.workers):
        free = [id for id, room in rooms.items() if room > given.count(id)]
        given.append(min(free, key=given.count))
    return tuple(given)


def _refusal(need: Need, line: Sequence[Node], driver: str) -> str:
    kind = need.kind
    have = ", ".join(f"{n.address}{' (this one)' if n.id == driver else ''} has {n.devices}" for n in line)
    wanted = f"{_count(need.nodes, 'node')} with {need.per_node} {kind} for the trainer, this one among them"
    if need.engines and not need.shared:
        wanted += f", and {_count(need.engines, 'engine')} of {need.per_engine} {kind} on one node each beside it"
    return (
        f"the Ray cluster cannot hold this run: it needs {wanted} ({need.total} {kind} together), and of its "
        f"{_count(len(line), 'node')} {have or 'none is alive'} ({sum(n.devices for n in line)} {kind} together); ask "
        "for less with --actor-num-gpus-per-node, --actor-num-nodes or --rollout-num-gpus, or add nodes"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _numeric(address: str) -> tuple[int, int, str]:
    """Addresses in the order of their numbers, and names behind them."""
    try:
        found = ip_address(address)
    except ValueError:
        return 9, 0, address
    return found.version, int(found), ""
