"""Transports: how a bucket gets to all servers of a publication. In requests, over a group of ranks, by a folder."""

from __future__ import annotations

import asyncio
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from miles.backends.sglang.buckets import Bucket
from miles.backends.sglang.client import Client, Lost
from miles.backends.sglang.lines import Line
from miles.cluster.platform import Platform
from miles.core.errors import EngineError
from miles.models.files import COMPANIONS, write_whole

Each = Callable[[Sequence[Line], Callable[[Line], Any]], Any]
"""Tell lines something all at once; servers that are lost on the way are dropped."""


class Carrier(Protocol):
    """``each`` is how lines are told: a server that is lost on the way is no error of the others'."""

    async def begin(self, lines: Sequence[Line], each: Each) -> None: ...
    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None: ...
    async def end(self, lines: Sequence[Line], each: Each) -> None: ...
    async def close(self) -> None: ...


class InRequests:
    """Each bucket is posted to each server."""

    async def begin(self, lines: Sequence[Line], each: Each) -> None: ...

    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None:
        await each(lines, lambda line: line.bucket(bucket))

    async def end(self, lines: Sequence[Line], each: Each) -> None: ...
    async def close(self) -> None: ...


class ByFolder:
    """Buckets become the files of a folder under ``root``, which every server reads when all are there."""

    def __init__(self, root: Path, like: Path) -> None:
        self._root, self._like = root, like
        self._folder: Path | None = None
        self._files = 0

    async def begin(self, lines: Sequence[Line], each: Each) -> None:
        folder = self._root / f"weights-{time.time_ns()}"
        folder.mkdir(parents=True)
        for name in ("config.json", *COMPANIONS):
            if (self._like / name).exists():
                shutil.copyfile(self._like / name, folder / name)
        self._drop()
        self._folder, self._files = folder, 0

    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None:
        assert self._folder is not None
        path, raw = self._folder / f"model-{self._files:05d}.safetensors", bucket.as_safetensors
        self._files += 1

        def write(out: BinaryIO) -> None:
            out.write(raw)

        await asyncio.to_thread(write_whole, path, write)

    async def end(self, lines: Sequence[Line], each: Each) -> None:
        folder = self._folder
        assert folder is not None
        if not self._files:  # nothing has changed
            return
        await each(lines, lambda line: line.load(folder))

    async def close(self) -> None:
        self._drop()

    def _drop(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class OverGroup:
    """One broadcast a bucket from this process, rank 0, to the ranks of all servers.

    The group is made anew whenever other servers are to be in it. Gloo on a host, NCCL (RCCL) on accelerators.
    """

    def __init__(self, platform: Platform, seconds: float, address: str = "127.0.0.1") -> None:
        self._platform, self._seconds, self._address = platform, seconds, address
        self._group: ProcessGroup | None = None
        self._name, self._members = "", ()
        self._made = 0

    async def begin(self, lines: Sequence[Line], each: Each) -> None:
        members = tuple(line.client for line in lines)
        if self._group is not None and members == self._members:
            return
        await self.close()
        self._made += 1
        port, name = _free_port(self._address), f"miles-{self._made}"
        ranks = [(await client.look()).ranks for client in members]
        world = 1 + sum(ranks)
        backend = "gloo" if self._platform.kind == "cpu" else "nccl"
        joining = asyncio.create_task(asyncio.to_thread(self._join, name, backend, port, world))
        told = {"master_address": self._address, "master_port": port, "world_size": world}
        told |= {"group_name": name, "backend": backend}
        offsets = {client: 1 + sum(ranks[:i]) for i, client in enumerate(members)}

        async def invite(client: Client) -> None:
            body = {**told, "rank_offset": offsets[client]}
            await client.ask("POST", "/init_weights_update_group", body, seconds=self._seconds)

        # All of them or none: who is lost here is found out by the next attempt.
        results = await asyncio.gather(joining, *map(invite, members), return_exceptions=True)
        wrong = next((r for r in results if isinstance(r, BaseException)), None)
        if wrong is not None:
            await self.close()
            raise Lost(f"the group that sends weights was not made: {wrong}") from wrong
        self._name, self._members = name, members

    async def carry(self, bucket: Bucket, lines: Sequence[Line], each: Each) -> None:
        flat, name = bucket.flat, self._name
        sending = asyncio.create_task(asyncio.to_thread(self._broadcast, flat))
        results = await asyncio.gather(
            sending, *(line.announce(bucket, name) for line in lines), return_exceptions=True
        )
        wrong = [r for r in results if isinstance(r, BaseException)]
        if wrong:
            await self.close()
            refusal = next((r for r in wrong if isinstance(r, EngineError) and not isinstance(r, Lost)), None)
            if refusal is not None and len(lines) == 1:
                raise refusal
            raise Lost(f"the group that sends weights broke ({wrong[0]})") from wrong[0]

    async def end(self, lines: Sequence[Line], each: Each) -> None: ...

    async def close(self) -> None:
        group, members, name = self._group, self._members, self._name
        self._group, self._members = None, ()
        if group is None:
            return
        words = (c.ask("POST", "/destroy_weights_update_group", {"group_name": name}, seconds=10.0) for c in members)
        await asyncio.gather(*words, return_exceptions=True)  # who is gone has left it already
        dist.destroy_process_group(group)

    def _join(self, name: str, backend: str, port: int, world: int) -> None:
        # torch has no public way to make a group beside the default one; servers use the same.
        from torch.distributed import distributed_c10d as c10d
        from torch.distributed.rendezvous import rendezvous

        limit = timedelta(seconds=self._seconds)
        found = next(iter(rendezvous(f"tcp://{self._address}:{port}", 0, world, timeout=limit)))
        store = c10d.PrefixStore(name, found[0])
        group, _ = c10d._new_process_group_helper(
            world,
            0,
            [],
            dist.Backend(backend),
            store,
            group_name=name,  # pyright: ignore[reportArgumentType]
            timeout=limit,
        )
        c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
        self._group = group  # pyright: ignore[reportAttributeAccessIssue]

    def _broadcast(self, flat: torch.Tensor) -> None:
        there = flat.to(self._platform.device)
        dist.broadcast(there, src=0, group=self._group)
        self._platform.synchronize()


def _free_port(address: str) -> int:
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]
