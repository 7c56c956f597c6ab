"""Process groups for weight updates: torch.distributed groups beside the default one.

torch has no public way to create a group that is not part of the default one. SGLang's clients use the same private
function; both sides must, because it decides under which keys of the store the ranks find each other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from math import prod
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from miles.core.errors import SyncError

JOIN_SECONDS = 120
RECEIVE_SECONDS = 300
T = TypeVar("T")


class PeerThreads:
    """Threads for work that waits for other machines, which may never answer: none that generation needs.

    ``at_once`` run at a time and ``waiting`` wait for their turn, in order; further work is refused. The threads are
    daemons, so they do not delay the end of the process.
    """

    def __init__(self, *, at_once: int, waiting: int) -> None:
        self._limit = at_once + waiting
        self._count = 0
        self._turns = asyncio.Semaphore(at_once)

    async def __call__(self, work: Callable[[], T]) -> T:
        if self._count >= self._limit:
            raise SyncError(f"{self._count} such requests wait for their peers already; try again later.")
        self._count += 1
        try:
            async with self._turns:
                return await _run_on_daemon_thread(work)
        finally:
            self._count -= 1


async def _run_on_daemon_thread(work: Callable[[], T]) -> T:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(cast(T, result))

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with suppress(RuntimeError):  # the event loop has been closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="weight-update-peer", daemon=True).start()
    return await done


class WeightUpdateGroups:
    """Groups by name. Every method waits for other ranks: call it on a thread, not on the event loop."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._joining: set[str] = set()

    def join(self, name: str, *, backend: str, address: str, port: int, rank: int, world_size: int) -> None:
        """Join a group as ``rank``; rank 0, the sender, hosts its store at ``address``:``port``."""
        if name in self._groups or name in self._joining:
            raise SyncError(f"The group {name!r} exists already; destroy it first.")
        if backend == "nccl" and self._device.type == "cpu":
            raise SyncError("This engine is on a CPU, where the backend must be gloo, not nccl.")
        self._joining.add(name)
        try:
            self._groups[name] = self._create(name, backend, address, port, rank, world_size)
        finally:
            self._joining.discard(name)

    def _create(
        self, name: str, backend: str, address: str, port: int, rank: int, world_size: int
    ) -> dist.ProcessGroup:
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        timeout = timedelta(seconds=JOIN_SECONDS)
        try:
            rendezvous_result = next(iter(rendezvous(f"tcp://{address}:{port}", rank, world_size, timeout=timeout)))
            store = c10d.PrefixStore(name, rendezvous_result[0])
            group, _ = c10d._new_process_group_helper(
                world_size,
                rank,
                [],
                dist.Backend(backend),
                store,
                group_name=name,  # pyright: ignore[reportArgumentType]
                timeout=timedelta(seconds=RECEIVE_SECONDS),
            )
        except (RuntimeError, ValueError, OSError) as error:
            raise SyncError(f"The group {name!r} cannot be joined: {_first_line(error)}.") from error
        assert isinstance(group, dist.ProcessGroup), "this rank is a member"
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
        return group

    def receive(
        self, name: str, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], *, flattened: bool
    ) -> dict[str, Tensor]:
        """The tensors that rank 0 broadcasts: one by one, or (``flattened``) all of them as one buffer of bytes."""
        group = self._groups.get(name)
        if group is None:
            raise SyncError(f"There is no group {name!r}; create it with init_weights_update_group first.")
        try:
            if flattened:
                return self._receive_flattened(group, tensors)
            received = {key: torch.empty(shape, dtype=dtype, device=self._device) for key, dtype, shape in tensors}
            works = [dist.broadcast(tensor, src=0, group=group, async_op=True) for tensor in received.values()]
            for work in works:
                if work is not None:
                    work.wait()
            return received
        except RuntimeError as error:
            raise SyncError(f"The group {name!r} did not send the weights: {_first_line(error)}.") from error

    def _receive_flattened(
        self, group: dist.ProcessGroup, tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]
    ) -> dict[str, Tensor]:
        sizes = [prod(shape) * dtype.itemsize for _, dtype, shape in tensors]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        dist.broadcast(buffer, src=0, group=group)
        parts = zip(buffer.split(sizes), tensors, strict=True)
        # A part may be misaligned for its dtype, so it is copied.
        return {key: part.clone().view(dtype).view(shape) for part, (key, dtype, shape) in parts}

    def leave(self, name: str) -> None:
        group = self._groups.pop(name, None)
        if group is None:
            raise SyncError(f"There is no group {name!r}.")
        dist.destroy_process_group(group)

    def close(self) -> None:
        for name in list(self._groups):
            self.leave(name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
