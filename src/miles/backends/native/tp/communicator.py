"""Collectives between the tensor-parallel ranks of one engine: sum, broadcast, gather and scatter, with a timeout.

Ranks with a GPU each use NCCL (RCCL on ROCm); CPU ranks, and ranks that share a GPU, use gloo through host memory,
bound to loopback. The process group belongs to the engine: torch's default group is neither needed nor touched.
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

from miles.cluster.spmd import RankLost
from miles.core.errors import EngineError
from miles.kernels.batch_invariant.elementwise import sum_in_rank_order
from miles.kernels.numerics import Numerics


class CommunicatorError(RankLost, EngineError):
    """Another rank died or timed out."""


class TpCommunicator:
    """One rank of ``world``; implements ``TpGroup``. All ranks make the same calls in the same order.

    They rendezvous in ``folder``, which is theirs alone and outlives them. ``exclusive_devices`` says that each rank
    has its own device. A call that waits longer than ``timeout`` seconds for the other ranks fails. With
    batch-invariant ``numerics`` sums are made in rank order.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        *,
        device: torch.device,
        exclusive_devices: bool,
        timeout: float,
        numerics: Numerics,
    ) -> None:
        self.rank = rank
        self.world = world
        self.device = device
        self._numerics = numerics
        self._through_host = device.type != "cpu" and not exclusive_devices
        limit = timedelta(seconds=timeout)
        with _as_communicator_error("could not connect to the other ranks"):
            self._store = FileStore(str(folder / "process_group"), world)
            self._store.set_timeout(limit)
            create_group = _create_nccl_group if device.type != "cpu" and exclusive_devices else _create_gloo_group
            self._group = create_group(self._store, rank, world, limit)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise equal on each; ``x`` may be overwritten."""
        out = self._stage(x)
        parts = [torch.empty_like(out) for _ in range(self.world)] if self._numerics.batch_invariant else []
        with _as_communicator_error("lost another rank in a sum"):
            if parts:
                self._group.allgather([parts], [out]).wait()
            else:
                self._group.allreduce([out]).wait()
        return (sum_in_rank_order(parts) if parts else out).to(self.device)

    def broadcast(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x``; that of the others is overwritten."""
        out = self._stage(x)
        with _as_communicator_error("lost another rank in a broadcast"):
            self._group.broadcast([out], _from_rank_0(dist.BroadcastOptions())).wait()
        return out.to(self.device)

    def gather(self, x: Tensor) -> list[Tensor]:
        """Return on rank 0 every rank's tensor, all of one shape, in rank order; an empty list on the others."""
        out = self._stage(x)
        parts = [torch.empty_like(out) for _ in range(self.world)] if self.rank == 0 else []
        with _as_communicator_error("lost another rank in a gather"):
            self._group.gather([parts] if parts else [], [out], _from_rank_0(dist.GatherOptions())).wait()
        return [part.to(self.device) for part in parts]

    def scatter(self, parts: Sequence[Tensor], into: Tensor) -> Tensor:
        """Return this rank's of rank 0's ``parts`` (empty on the other ranks); ``into`` has its shape."""
        out = self._stage(into)
        inputs = [[self._stage(part) for part in parts]] if parts else []
        with _as_communicator_error("lost another rank in a scatter"):
            self._group.scatter([out], inputs, _from_rank_0(dist.ScatterOptions())).wait()
        return out.to(self.device)

    def abort(self) -> None:
        """Abort pending collectives, from any thread; the communicator is unusable afterwards."""
        self._group.abort()

    def _stage(self, x: Tensor) -> Tensor:
        return x.cpu() if self._through_host else x.contiguous()


@contextmanager
def _as_communicator_error(problem: str) -> Iterator[None]:
    """Turn the RuntimeError torch raises for a broken group into a ``CommunicatorError``."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicatorError(f"{problem}: {str(error).splitlines()[0]}") from error


# torch's annotations cover few calls of its C++ process groups, hence Any.


def _from_rank_0(options: Any) -> Any:
    options.rootRank = 0
    return options


def _create_gloo_group(store: Store, rank: int, world: int, limit: timedelta) -> Any:
    backend: Any = dist.ProcessGroupGloo
    options = backend._Options()
    options._timeout = limit
    options._devices = [backend.create_device(hostname="127.0.0.1")]
    return backend(PrefixStore("gloo", store), rank, world, options)


def _create_nccl_group(store: Store, rank: int, world: int, limit: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, world, options)
