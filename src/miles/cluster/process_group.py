"""Lifecycle of torch's default process group: initialize, set timeouts, abort, destroy.

Ranks with a device each use NCCL (RCCL on ROCm), and gloo for CPU tensors; on CPU, or if several ranks share a device,
gloo only. Gloo binds to loopback, or, if ranks are on several nodes, to the interface that reaches the leader.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
from torch import distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from miles.cluster.spmd import RankContext, RankLost

_INTERFACE_ENV = "GLOO_SOCKET_IFNAME"
# Linux's ioctl for the address of a network interface.
_SIOCGIFADDR = 0x8915

# What torch's errors about a broken group contain, beside those that have a class of their own.
_GROUP_ERRORS = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "rocess group")


# If ranks are on several nodes: the sockets of this process, by descriptor and inode, before it joined the group, and
# those opened since then, most of them the group's.
_sockets_before: set[tuple[int, int]] | None = None
_group_sockets: set[tuple[int, int]] = set()


def init_process_group(context: RankContext) -> torch.device:
    """Join the default process group; returns this rank's device, which is the current device from now on."""
    global _sockets_before
    _group_sockets.clear()
    _sockets_before = _list_sockets() if context.rendezvous else None
    device = set_device(context)
    interface = _find_interface(context.rendezvous) if context.rendezvous else _find_loopback()
    os.environ.setdefault(_INTERFACE_ENV, interface)
    timeout = timedelta(seconds=context.timeout)
    with convert_group_errors():
        store = _create_store(context, timeout)
        store.set_timeout(timeout)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type != "cpu" and context.exclusive_devices else "gloo",
            store=store,
            rank=context.rank,
            world_size=context.world_size,
            timeout=timeout,
        )
    return device


def set_device(context: RankContext) -> torch.device:
    """Make this rank's device the current one, and return it."""
    device = torch.device(context.device)
    if device.type != "cpu":
        torch.cuda.set_device(device)
    return device


def _create_store(context: RankContext, timeout: timedelta) -> Store:
    """The rendezvous store: a file, or TCP if ranks are on several nodes."""
    if not context.rendezvous:
        return FileStore(str(context.folder / "group"), context.world_size)
    host, _, port = context.rendezvous.rpartition(":")
    is_master = context.rank == 0 and context.leader_is_rank
    return TCPStore(host, int(port), context.world_size, is_master=is_master, timeout=timeout, wait_for_workers=False)


def serve_rendezvous(address: str) -> tuple[Store, str]:
    """Serve the rendezvous of ranks elsewhere on ``address``; returns the store, to be kept, and its host:port."""
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    return store, f"{address}:{store.port}"


def set_group_timeouts(seconds: float) -> None:
    """Set the timeout of every process group; subgroups are created with torch's default."""
    if _sockets_before is not None:
        _group_sockets.update(_list_sockets() - _sockets_before)
    for group in list(c10d._world.pg_map):
        c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def abort_process_groups() -> None:
    """Abort what is in flight in every group, from any thread; groups are unusable then, but still to be destroyed.

    Gloo waits for a peer until its connection breaks, which a connection to an unreachable node never does: it is shut
    down here. Other connections opened meanwhile are shut down too; their owners retry.
    """
    if _sockets_before is not None:
        current = _list_sockets()
        for descriptor, _ in (_group_sockets or current - _sockets_before) & current:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
    for group in list(c10d._world.pg_map):
        group.abort()


def _list_sockets() -> set[tuple[int, int]]:
    sockets: set[tuple[int, int]] = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                sockets.add((int(name), status.st_ino))
    return sockets


def destroy_process_group(*, broken: bool = False) -> None:
    """Leave the default process group, if it was joined; a ``broken`` one without a handshake."""
    if not dist.is_initialized():
        return
    if broken:
        c10d._abort_process_group()
    else:
        dist.destroy_process_group()


@contextmanager
def convert_group_errors() -> Iterator[None]:
    """Convert errors about a broken process group to ``RankLost``."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(text in str(error) for text in _GROUP_ERRORS):
            raise RankLost((str(error).splitlines() or ["the process group failed"])[0]) from error
        raise


def _find_loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _find_interface(address: str) -> str:
    """The network interface of this machine that reaches a host:port."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing: it only selects a route
        own_address = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == own_address:
                    return name
    return _find_loopback()
