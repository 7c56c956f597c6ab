"""An engine's runner whose model several ranks share: it has a runner's face, and leads the others.

What the leader is told it tells the followers, then does its own share. Whatever fails on one rank fails for all: the
ranks cannot go on without each other, so the engine's requests end with one sentence, and its processes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from miles.backends.native.follower import RankRunner, Work, follow, platform_of, show, take
from miles.backends.native.order import Drawn, Flight, Order
from miles.backends.native.ranks import ranks_of
from miles.backends.native.ring import Ring, RingError
from miles.backends.native.weights import Adopt, Weights
from miles.cluster.platform import Platform
from miles.cluster.team import Team, said
from miles.core.errors import EngineError, SyncError
from miles.models.decoder import Decoder
from miles.models.shard import shares, spec_of_rank
from miles.models.spec import DecoderSpec
from miles.sync.manifest import digest

# Seconds one rank waits for another: more than a compiler takes.
PATIENCE = 300.0

Capacity = Callable[[DecoderSpec, Platform], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Room(Platform):
    """All ranks' devices as one: each has at least so much free memory."""

    free: int

    def free_bytes(self) -> int:
        return self.free


def lead(
    name: str, work: Work, devices: Sequence[torch.device], *, pages: Capacity, patience: float = PATIENCE
) -> Leader:
    """Start the other ranks of an engine, one a device, and join them.

    ``pages`` says how many the cache is to have, given a rank's model and its memory.
    """
    small = spec_of_rank(work.spec, len(devices))
    apart = len(set(devices)) == len(devices)
    ranks = ranks_of(name, [str(each) for each in devices], partial(follow, work=work), apart=apart, patience=patience)
    try:
        platform = platform_of(devices[0])
        free = (platform.free_bytes(), *ranks.replies())
        # Ranks on one device share what is free there.
        room = min(each // devices.count(where) for each, where in zip(free, devices, strict=True))
        return Leader(ranks, work, platform, pages(small, _room(platform, room)))
    except BaseException:
        ranks.close()
        raise


def _room(platform: Platform, free: int) -> _Room:
    return _Room(
        kind=platform.kind, device=platform.device, name=platform.name, memory_bytes=platform.memory_bytes, free=free
    )


class Leader(RankRunner):
    """Rank 0, and the runner the engine sees."""

    def __init__(self, ranks: Team, work: Work, platform: Platform, pages: int) -> None:
        self.ranks = ranks
        self.pages = pages
        self._whole = work.spec
        self._open = False
        ranks.tell("open", pages)
        with self._together():
            place = ranks.place
            ring = Ring(
                place.folder, 0, place.world, device=platform.device, apart=place.apart, patience=place.patience
            )
            super().__init__(work, ring, pages)
        ranks.replies()
        ranks.watch(ring.abort)
        self._open = True

    # -- a runner's face --------------------------------------------------------------------

    def launch(self, order: Order) -> Flight:
        with self.ranks.turn:
            self.ranks.tell("launch", _told(order))
            with self._together():
                return _Joint(super().launch(order), self.ranks)

    def allocate(self) -> None:
        if not self._open:  # the others begin with as much
            super().allocate()
            return
        with self.ranks.turn:
            self.ranks.tell("allocate")
            super().allocate()
            self.ranks.replies()

    def free(self) -> None:
        self.ranks.tell("free")
        super().free()

    def clear(self) -> None:
        if not self.ranks.fault:
            super().clear()

    def expected(self) -> dict[str, Tensor]:
        return dict(Decoder(self._whole, device="meta", dtype=self.dtype).named_parameters())

    def adopt(self, tensors: Mapping[str, Tensor], own: Collection[str] = ()) -> None:
        """Compute with these slices from now on, and the others with theirs."""
        with self.ranks.turn:
            self.ranks.tell("commit")
            super().adopt(tensors, own)

    def receiver(self, name: str, adopt: Adopt) -> Weights:
        return PartedWeights(name, self, adopt)

    def check(self) -> None:
        self.ranks.check()

    def close(self) -> None:
        self.ranks.close()
        self.ring.abort()

    # -- weights ----------------------------------------------------------------------------

    def hand_out(self, name: str, tensor: Tensor) -> Tensor:
        """Give every rank its slice of a whole tensor; returns the leader's own."""
        share, whole = shares(self._whole)[name], tensor.to(self.device)
        slices = [share.of(whole, rank, self.ring.world) for rank in range(self.ring.world)]
        with self.ranks.turn, self._together():
            self.ranks.tell("take", {"name": name, "digests": tuple(digest(part) for part in slices)})
            return take(self.ring, slices, slices[0])

    def weights(self) -> Mapping[str, Tensor]:
        """Whole tensors, each put together when it is looked at."""
        return _Gathered(self)

    def gathered(self, name: str) -> Tensor:
        """The whole tensor the ranks compute with now."""
        share = shares(self._whole)[name]
        with self.ranks.turn, self._together():
            self.ranks.tell("show", name)
            return share.gathered(show(self.ring, super().weights()[name]))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do at once: an error here leaves the others in the middle, so it ends them."""
        try:
            yield
        except RingError as error:
            raise self.ranks.lose(error=error) from error
        except EngineError:
            raise
        except Exception as error:
            raise self.ranks.lose(f"rank 0 of {self.ranks.world} failed: {said(error)}") from error


class PartedWeights(Weights):
    """A staging area spread over the ranks: whole tensors are checked here, and each rank checks its slices."""

    def __init__(self, name: str, leader: Leader, adopt: Adopt) -> None:
        super().__init__(name, leader.expected(), leader.device, adopt)
        self._leader = leader
        self._counted: dict[str, int] = {}

    def verify(self) -> None:
        super().verify()
        ranks = self._leader.ranks
        with ranks.turn:
            ranks.tell("verify")
            for rank, wrong in enumerate(ranks.replies(), 1):
                if wrong:
                    raise SyncError(f"{self._name}: rank {rank} has other bits of tensor {wrong[0]} than were sent")

    def rollback(self) -> None:
        super().rollback()
        self._counted = {}
        if not self._leader.ranks.fault:
            self._leader.ranks.tell("rollback")

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        self._counted[name] = digest(tensor)
        return self._leader.hand_out(name, tensor)

    def _digests(self) -> Mapping[str, int]:
        return self._counted


class _Gathered(Mapping[str, Tensor]):
    """What the ranks hold, as if one held it."""

    def __init__(self, leader: Leader) -> None:
        self._leader = leader
        self._names = leader.expected()

    def __getitem__(self, name: str) -> Tensor:
        return self._leader.gathered(name) if name in self._names else self._names[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Joint:
    """A step under way on all ranks (a ``Flight``)."""

    def __init__(self, own: Flight, ranks: Team) -> None:
        self._own = own
        self._ranks = ranks

    def land(self) -> Drawn:
        try:
            return self._own.land()
        except EngineError:  # of what was computed; the ranks are well
            raise
        except Exception as error:
            raise self._ranks.lose(error=error) from error


def _told(order: Order) -> Order:
    """What followers need of an order: not how logits are changed and read, which only the leader does."""
    scoring = None if order.scoring is None else replace(order.scoring, looks=None)
    return replace(order, edits=None, looks=None, scoring=scoring)
