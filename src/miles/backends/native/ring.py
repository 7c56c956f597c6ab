"""The ranks of one engine, joined: sums, gathers and hand-outs between their devices, each with a deadline.

Ranks with a device each talk over NCCL (RCCL on ROCm); on a CPU, and where several share a device, over gloo by way
of the host, bound to loopback. The group is the engine's own: torch's default group is neither needed nor touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store

from miles.cluster.team import Lost
from miles.core.errors import EngineError
from miles.kernels.arithmetic import exact
from miles.kernels.exact.elements import in_order


class RingError(Lost, EngineError):
    """Another rank is gone, or too late."""


class Ring:
    """One rank's seat among ``world``; implements models.rank.Ring. All ranks make the same calls in the same order.

    They find each other in ``folder``, which is theirs alone and outlives them. ``apart`` says that each has a device
    of its own. Whoever waits longer than ``patience`` seconds for the others gives up.
    """

    def __init__(
        self, folder: Path, rank: int, world: int, *, device: torch.device, apart: bool, patience: float
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._staged = device.type != "cpu" and not apart
        limit = timedelta(seconds=patience)
        with _told("could not join the others"):
            self._store = FileStore(str(folder / "ring"), world)
            self._store.set_timeout(limit)
            make = _nccl if device.type != "cpu" and apart else _gloo
            self._group = make(self._store, rank, world, limit)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; ``x`` may be overwritten."""
        out = self._staging(x)
        if exact():
            return in_order(self._everyones(out)).to(self.device)
        with _told("lost another rank in a sum"):
            self._group.allreduce([out]).wait()
        return out.to(self.device)

    def _everyones(self, x: Tensor) -> list[Tensor]:
        """What every rank has, in order."""
        parts = [torch.empty_like(x) for _ in range(self.world)]
        with _told("lost another rank in a sum"):
            self._group.allgather([parts], [x]).wait()
        return parts

    def broadcast(self, x: Tensor) -> Tensor:
        """The first rank's ``x``; that of the others is overwritten."""
        out = self._staging(x)
        with _told("lost another rank in a broadcast"):
            self._group.broadcast([out], _rooted(dist.BroadcastOptions())).wait()
        return out.to(self.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        """On the first rank what every rank has, all of one shape, in order; nothing on the others."""
        out = self._staging(x)
        parts = [torch.empty_like(out) for _ in range(self.world)] if self.rank == 0 else []
        with _told("lost another rank in a gather"):
            self._group.gather([parts] if parts else [], [out], _rooted(dist.GatherOptions())).wait()
        return [part.to(self.device) for part in parts]

    def scatter(self, parts: Sequence[Tensor], into: Tensor) -> Tensor:
        """What the first rank has for this one in ``parts``, which is empty on the others; ``into`` says its shape."""
        out, given = self._staging(into), [[self._staging(part) for part in parts]] if parts else []
        with _told("lost another rank in a scatter"):
            self._group.scatter([out], given, _rooted(dist.ScatterOptions())).wait()
        return out.to(self.device)

    def abort(self) -> None:
        """End what is under way; only for a ring that is given up, from whatever thread."""
        self._group.abort()

    def _staging(self, x: Tensor) -> Tensor:
        return x.cpu() if self._staged else x.contiguous()


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Torch's word for a broken group is RuntimeError, and its text is for its makers."""
    try:
        yield
    except RuntimeError as error:
        raise RingError(f"{what}: {str(error).splitlines()[0]}") from error


# A group is what torch makes of its C++ backends; its own annotations know few of their calls.


def _rooted(options: Any) -> Any:
    options.rootRank = 0
    return options


def _gloo(store: Store, rank: int, world: int, limit: timedelta) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._timeout = limit
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    return backend(PrefixStore("gloo", store), rank, world, options)


def _nccl(store: Store, rank: int, world: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world, options)
