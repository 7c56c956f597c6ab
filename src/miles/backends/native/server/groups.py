"""Groups of ranks that send weights: torch.distributed process groups beside the default one.

torch has no public way to make a group that is not a part of the default one. Clients of SGLang make theirs with the
same private function of torch; both sides must, because it decides where in the store ranks look for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from miles.core.errors import SyncError

JOIN_SECONDS = 300


class Groups:
    """Groups by name. All that it does waits for other ranks: call it beside the event loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}

    def join(self, name: str, *, backend: str, address: str, port: int, rank: int, world: int) -> None:
        """Become rank ``rank`` of a group; rank 0, the sender, holds its store at ``address``:``port``."""
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        if name in self._groups:
            raise SyncError(f"The group {name!r} is there already; destroy it first.")
        if backend == "nccl" and self._device.type == "cpu":
            raise SyncError("This engine is on a CPU, where the backend of a group is gloo, not nccl.")
        limit = timedelta(seconds=JOIN_SECONDS)
        try:
            found = next(iter(rendezvous(f"tcp://{address}:{port}", rank, world, timeout=limit)))
            store = c10d.PrefixStore(name, found[0])
            group, _ = c10d._new_process_group_helper(
                world,
                rank,
                [],
                dist.Backend(backend),
                store,
                group_name=name,  # pyright: ignore[reportArgumentType]
                timeout=limit,
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"The group {name!r} cannot be joined: {_first_line(error)}.") from error
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._groups[name] = group

    def receive(
        self, name: str, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], *, flat: bool
    ) -> dict[str, Tensor]:
        """What rank 0 broadcasts: each tensor in turn, or (``flat``) the bytes of all one after the other."""
        group = self._groups.get(name)
        if group is None:
            raise SyncError(f"There is no group {name!r}; make one with init_weights_update_group first.")
        try:
            if flat:
                return self._receive_flat(group, tensors)
            found = {key: torch.empty(shape, dtype=kind, device=self._device) for key, kind, shape in tensors}
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in found.values()]
            for work in works:
                if work is not None:
                    work.wait()
            return found
        except RuntimeError as error:
            raise SyncError(f"The group {name!r} did not bring the weights: {_first_line(error)}.") from error

    def _receive_flat(
        self, group: dist.ProcessGroup, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> dict[str, Tensor]:
        sizes = [prod(shape) * kind.itemsize for _, kind, shape in tensors]
        everything = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.broadcast(everything, src=0, group=group)
        parts = everything.split(sizes)
        return {key: _typed(part, kind).view(shape) for part, (key, kind, shape) in zip(parts, tensors, strict=True)}

    def leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise SyncError(f"There is no group {name!r}.")
        dist.destroy_process_group(group)

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)


def _typed(part: Tensor, kind: torch.dtype) -> Tensor:
    """Bytes as numbers; they may begin where no number may, so they are copied."""
    return part.clone().view(kind)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
