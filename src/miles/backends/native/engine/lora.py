"""LoRA adapters of the engine: named and versioned, in host memory, the ones in use in device slots (LRU).

An adapter that running requests use keeps its slot; the least recently used of the others gives its slot to an adapter
that has none. An update in place gives an adapter another ``uid``: requests go on with the new version, and no prefix
of the old one is found any more.

Shapes: B sequences of a step, S request slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

import numpy as np

from miles.backends.native.engine.request import Ints
from miles.core.errors import EngineError, UsageError
from miles.core.types import Version
from miles.models.lora.factors import LoraFactors

__all__ = ["LoraBatch", "LoraHost", "LoraRegistry", "LoraShape", "LoraSlotTable", "ServedAdapter"]

_NO_LOADS: tuple[Ints, Ints] = (np.zeros(0, np.int64), np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraShape:
    """Room for adapters on a device: slots, the largest rank, and the modules (checkpoint names) they may target.

    ``max_loaded`` is the most adapters in host memory; None is any number.
    """

    num_slots: int
    max_rank: int
    modules: tuple[str, ...]
    max_loaded: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBatch:
    """The adapters of a step: the device slot of each sequence, -1 without one.

    ``loads`` are (uids, slots) of adapters that are copied into slots before anything is computed.
    """

    slots_B: Ints
    loads: tuple[Ints, Ints] = _NO_LOADS


@dataclass(slots=True, eq=False, kw_only=True)
class ServedAdapter:
    """A named adapter. ``uid`` names its current version and is never reused; ``version`` counts its updates.

    ``folder`` is where it is read from again after its host copy was dropped (``in_host`` is False then).
    ``policy_version`` is that of a run, which published it.
    """

    name: str
    uid: int
    rank: int
    version: int = 0
    pinned: bool = False
    folder: Path | None = None
    in_host: bool = True
    last_used: int = 0
    policy_version: Version | None = None


class LoraSlotTable:
    """Which adapter is in which device slot. ``loads`` are due before the next step that uses an adapter."""

    def __init__(self, num_slots: int) -> None:
        self.loads: dict[int, ServedAdapter] = {}
        self._owners: list[ServedAdapter | None] = [None] * num_slots
        self._num_users = [0] * num_slots
        # Slots from the least to the most recently used.
        self._order = list(range(num_slots))

    def find(self, adapter: ServedAdapter) -> int:
        """Return the adapter's slot, or -1."""
        return self._owners.index(adapter) if adapter in self._owners else -1

    def has_room(self, adapter: ServedAdapter) -> bool:
        """Return whether a request of this adapter can join the running ones."""
        return self.find(adapter) >= 0 or self._find_evictable() >= 0

    def acquire(self, adapter: ServedAdapter) -> int:
        """Add a running request of an adapter that has room; return its slot."""
        slot = self.find(adapter)
        if slot < 0:
            slot = self._find_evictable()
            assert slot >= 0, "no adapter slot is free"
            self._owners[slot] = self.loads[slot] = adapter
        self._num_users[slot] += 1
        self._order.remove(slot)
        self._order.append(slot)
        return slot

    def release(self, adapter: ServedAdapter) -> None:
        """Remove a running request of an adapter."""
        self._num_users[self.find(adapter)] -= 1

    def reload(self, adapter: ServedAdapter) -> None:
        """Load the adapter's new version into its slot, if it has one."""
        if (slot := self.find(adapter)) >= 0:
            self.loads[slot] = adapter

    def forget(self, adapter: ServedAdapter) -> None:
        """Free the slot of an adapter that no running request uses."""
        if (slot := self.find(adapter)) >= 0:
            assert not self._num_users[slot], "a running request uses the adapter"
            self._owners[slot] = None
            self.loads.pop(slot, None)

    def forget_contents(self) -> None:
        """Free the slots without running requests, whose content may not have been written."""
        for slot, users in enumerate(self._num_users):
            if not users:
                self._owners[slot] = None
                self.loads.pop(slot, None)

    def build_batch(self, slots_B: Ints) -> LoraBatch | None:
        """Return the adapters of a step whose sequences have these slots, with all due loads; None without any."""
        if not len(slots_B) or slots_B.max() < 0:
            return None
        loads, self.loads = self.loads, {}
        if not loads:
            return LoraBatch(slots_B=slots_B)
        uids = np.array([adapter.uid for adapter in loads.values()], np.int64)
        return LoraBatch(slots_B=slots_B, loads=(uids, np.array(list(loads), np.int64)))

    def check(self, adapters: Sequence[ServedAdapter]) -> None:
        """Assert that slots are used by the running requests of these adapters."""
        for slot, users in enumerate(self._num_users):
            assert users == sum(adapter is self._owners[slot] for adapter in adapters)

    def _find_evictable(self) -> int:
        """Return a free slot, else the least recently used one without running requests, or -1."""
        idle = [slot for slot in self._order if not self._num_users[slot]]
        free = next((slot for slot in idle if self._owners[slot] is None), None)
        if free is not None:
            return free
        return next((slot for slot in idle if (owner := self._owners[slot]) is None or not owner.pinned), -1)


class LoraHost(Protocol):
    """What keeps the factors of adapters in host memory: a model runner."""

    def register_lora(self, uid: int, factors: LoraFactors) -> None: ...
    def unregister_lora(self, uid: int) -> None: ...


@dataclass(slots=True, kw_only=True)
class LoraRegistry:
    """The adapters of one engine by name.

    ``read`` reads the factors of a folder. ``is_used`` says whether a request that has not ended uses an adapter.
    ``current`` is the adapter of requests that name none: the last that was published.
    """

    shape: LoraShape
    host: LoraHost
    slots: LoraSlotTable
    read: Callable[[Path], LoraFactors]
    is_used: Callable[[ServedAdapter], bool]
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)
    current: ServedAdapter | None = None
    _unloaded: list[ServedAdapter] = field(default_factory=list)
    _uids: count[int] = field(default_factory=lambda: count(1))
    _uses: count[int] = field(default_factory=lambda: count(1))

    def resolve(self, name: str) -> ServedAdapter:
        """Return an adapter for a new request; its factors are in host memory."""
        adapter = self.adapters.get(name)
        if adapter is None:
            loaded = ", ".join(sorted(self.adapters)[:16]) or "none"
            raise EngineError(f"there is no LoRA adapter {name!r}; loaded: {loaded}")
        adapter.last_used = next(self._uses)
        if not adapter.in_host:
            assert adapter.folder is not None
            try:
                factors = self.read(adapter.folder)
                self.check_fits(factors)
                self._make_room()
            except UsageError as error:
                raise EngineError(f"the LoRA adapter {name!r} cannot be read again: {error}") from error
            # What is in the folder now may be another version: no prefix of the former one may be found.
            adapter.uid = next(self._uids)
            adapter.rank = factors.rank
            adapter.in_host = True
            self.host.register_lora(adapter.uid, factors)
            self.slots.forget(adapter)
        return adapter

    def prepare(self, factors: LoraFactors) -> int:
        """Copy factors to host memory, as a version that no adapter has yet; return its uid. Steps may run."""
        self.check_fits(factors)
        uid = next(self._uids)
        self.host.register_lora(uid, factors)
        return uid

    def discard(self, uid: int) -> None:
        """Drop prepared factors that no adapter got."""
        self.host.unregister_lora(uid)

    def load(
        self, name: str, uid: int, rank: int, *, pinned: bool = False, folder: Path | None = None
    ) -> ServedAdapter:
        """Add an adapter with prepared factors under a new name."""
        if name in self.adapters:
            raise UsageError(f"a LoRA adapter {name!r} is loaded already; unload it first, or update it")
        if pinned and sum(adapter.pinned for adapter in self.adapters.values()) + 1 >= self.shape.num_slots:
            raise UsageError(
                f"{name!r} cannot be pinned: one of the {self.shape.num_slots} slots must stay for other adapters; "
                "raise --max-loras-per-batch"
            )
        self.collect()
        self._make_room()
        adapter = ServedAdapter(name=name, uid=uid, rank=rank, pinned=pinned, folder=folder)
        adapter.last_used = next(self._uses)
        self.adapters[name] = adapter
        return adapter

    def update(self, name: str, uid: int, rank: int, folder: Path | None = None) -> ServedAdapter:
        """Give an adapter prepared factors. The caller sees to the requests that use it."""
        adapter = self.adapters.get(name)
        if adapter is None:
            raise UsageError(f"there is no LoRA adapter {name!r} to update")
        if adapter.in_host:
            self.host.unregister_lora(adapter.uid)
        else:
            self._make_room()
        adapter.version += 1
        adapter.uid = uid
        adapter.rank = rank
        adapter.folder = folder
        adapter.in_host = True
        self.slots.reload(adapter)
        return adapter

    def unload(self, name: str) -> ServedAdapter:
        """Remove a name; requests that use the adapter keep it until they end."""
        adapter = self.adapters.pop(name, None)
        if adapter is None:
            raise UsageError(f"there is no LoRA adapter {name!r} to unload")
        adapter.pinned = False
        self._unloaded.append(adapter)
        self.collect()
        return adapter

    def publish(self, version: Version, uid: int, rank: int, *, keep: int) -> ServedAdapter:
        """Add the adapter of a policy's version, ``actor-7``, and make it the current one; the last ``keep`` stay.

        These are two at least: a request that is about to be queued may have the one before.
        """
        name = f"{version.policy}-{version.number}"
        if name in self.adapters:  # published again, after a rollback
            self.unload(name)
        adapter = self.load(name, uid, rank)
        adapter.policy_version = version
        self.current = adapter
        published = [each.name for each in self.adapters.values() if each.policy_version is not None]
        for old in published[:-keep]:
            self.unload(old)
        return adapter

    @property
    def has_unloaded(self) -> bool:
        """Whether an unloaded adapter was still used when that was last looked at."""
        return bool(self._unloaded)

    def collect(self) -> None:
        """Free the memory of unloaded adapters that no request uses any more."""
        kept: list[ServedAdapter] = []
        for adapter in self._unloaded:
            if self.is_used(adapter):
                kept.append(adapter)
                continue
            self.slots.forget(adapter)
            if adapter.in_host:
                self.host.unregister_lora(adapter.uid)
        self._unloaded = kept

    def check_fits(self, factors: LoraFactors) -> None:
        """Raise a UsageError if an adapter needs more than the slots have."""
        if factors.rank > self.shape.max_rank:
            raise UsageError(
                f"its rank is {factors.rank}, but adapters have at most {self.shape.max_rank}; raise --max-lora-rank"
            )
        served = set(self.shape.modules)
        other = next((module for module in factors.modules if module not in served), None)
        if other is not None:
            raise UsageError(
                f"it has an adapter of {other}, which is not among the modules of --lora-target-modules, or is not "
                "served beside the weights"
            )

    def _make_room(self) -> None:
        """Drop the host copy of the least recently used adapter that can be read again, if host memory is full."""
        limit = self.shape.max_loaded
        held = [adapter for adapter in self.adapters.values() if adapter.in_host]
        if limit is None or len(held) < limit:
            return
        idle = [each for each in held if each.folder is not None and not each.pinned and not self.is_used(each)]
        if not idle:
            raise UsageError(
                f"{len(held)} LoRA adapters are loaded, the most that --max-loaded-loras allows, and none of them can "
                "be read from a folder again; unload one, or raise it"
            )
        oldest = min(idle, key=lambda adapter: adapter.last_used)
        self.slots.forget(oldest)
        self.host.unregister_lora(oldest.uid)
        oldest.in_host = False
