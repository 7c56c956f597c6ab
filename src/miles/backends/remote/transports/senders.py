"""Weight transports over HTTP requests, over a NCCL or Gloo process group, and over files on disk."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed import ProcessGroup

from miles.backends.remote.client import ServerLost, SglangClient
from miles.backends.remote.transports.buckets import Bucket
from miles.backends.remote.update_protocols import ForEachServer, UpdateProtocol
from miles.cluster.platform import Platform
from miles.core.errors import EngineError
from miles.models.checkpoint.safetensors_io import TOKENIZER_FILES, write_atomically


class WeightTransport:
    """Sends buckets to all servers of an update; ``for_each`` runs a step on all of them."""

    async def begin(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None: ...

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        raise NotImplementedError

    async def finish(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None: ...
    async def close(self) -> None: ...


class HttpTransport(WeightTransport):
    """Each bucket is sent to each server in an HTTP request."""

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        await for_each(updates, lambda update: update.send_bucket(bucket))


class DiskTransport(WeightTransport):
    """Buckets become the files of a folder under ``root``, which every server loads at the end.

    ``config_folder`` has the configuration and tokenizer files that go with them.
    """

    def __init__(self, root: Path, config_folder: Path) -> None:
        self._root = root
        self._config_folder = config_folder
        self._folder: Path | None = None
        self._files = 0

    async def begin(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        folder = self._root / f"weights-{time.time_ns()}"
        folder.mkdir(parents=True)
        for name in ("config.json", *TOKENIZER_FILES):
            if (self._config_folder / name).exists():
                shutil.copyfile(self._config_folder / name, folder / name)
        self._remove_folder()
        self._folder = folder
        self._files = 0

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        assert self._folder is not None
        path = self._folder / f"model-{self._files:05d}.safetensors"
        raw = bucket.as_safetensors
        self._files += 1

        def write(out: BinaryIO) -> None:
            out.write(raw)

        await asyncio.to_thread(write_atomically, path, write)

    async def finish(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        folder = self._folder
        assert folder is not None
        if not self._files:  # nothing has changed
            return
        await for_each(updates, lambda update: update.load_from_disk(folder))

    async def close(self) -> None:
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class DistributedTransport(WeightTransport):
    """One broadcast per bucket from this process, rank 0, to the ranks of all servers.

    The process group is created again whenever the servers change. Gloo on CPU, NCCL (RCCL) on accelerators.
    """

    def __init__(self, platform: Platform, seconds: float, address: str = "127.0.0.1") -> None:
        self._platform = platform
        self._seconds = seconds
        self._address = address
        self._group: ProcessGroup | None = None
        self._name = ""
        self._members: tuple[SglangClient, ...] = ()
        self._num_groups = 0

    async def begin(self, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        members = tuple(update.client for update in updates)
        if self._group is not None and members == self._members:
            return
        await self.close()
        self._num_groups += 1
        limit = timedelta(seconds=self._seconds)
        # Bound here to a port of the kernel's choice, so that it cannot be taken meanwhile.
        store = TCPStore(self._address, 0, is_master=True, timeout=limit, wait_for_workers=False)
        name = f"miles-{self._num_groups}"
        ranks = [(await client.fetch_info()).ranks for client in members]
        world = 1 + sum(ranks)
        backend = "gloo" if self._platform.kind == "cpu" else "nccl"
        joining = asyncio.create_task(asyncio.to_thread(self._join, name, backend, store, world))
        common = {"master_address": self._address, "master_port": store.port, "world_size": world}
        common |= {"group_name": name, "backend": backend}
        offsets = {client: 1 + sum(ranks[:i]) for i, client in enumerate(members)}

        async def invite(client: SglangClient) -> None:
            body = {**common, "rank_offset": offsets[client]}
            await client.request("POST", "/init_weights_update_group", body, seconds=self._seconds)

        # All of them or none: the next try finds out which server is lost.
        results = await asyncio.gather(joining, *map(invite, members), return_exceptions=True)
        failure = next((result for result in results if isinstance(result, BaseException)), None)
        if failure is not None:
            await self.close()
            raise ServerLost(f"the process group for weight updates was not created: {failure}") from failure
        self._name, self._members = name, members

    async def send_bucket(self, bucket: Bucket, updates: Sequence[UpdateProtocol], for_each: ForEachServer) -> None:
        flat, name = bucket.flat, self._name
        sending = asyncio.create_task(asyncio.to_thread(self._broadcast, flat))
        results = await asyncio.gather(
            sending, *(update.announce_bucket(bucket, name) for update in updates), return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            rejected = next((e for e in errors if isinstance(e, EngineError) and not isinstance(e, ServerLost)), None)
            if rejected is not None and len(updates) == 1:
                raise rejected
            raise ServerLost(f"the process group for weight updates failed ({errors[0]})") from errors[0]

    async def close(self) -> None:
        group, members, name = self._group, self._members, self._name
        self._group, self._members = None, ()
        if group is None:
            return
        requests = (
            c.request("POST", "/destroy_weights_update_group", {"group_name": name}, seconds=10.0) for c in members
        )
        await asyncio.gather(*requests, return_exceptions=True)  # lost servers have left it already
        dist.destroy_process_group(group)

    def _join(self, name: str, backend: str, tcp_store: TCPStore, world: int) -> None:
        # torch has no public way to create a process group beside the default one; servers do the same.
        from torch.distributed import distributed_c10d as c10d

        limit = timedelta(seconds=self._seconds)
        store = c10d.PrefixStore(name, tcp_store)
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
        on_device = flat.to(self._platform.device)
        dist.broadcast(on_device, src=0, group=self._group)
        self._platform.synchronize()
