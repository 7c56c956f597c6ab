"""A team's ranks in torch's default process group: joined, given a deadline, aborted and left.

Ranks with a device each talk over NCCL (RCCL on ROCm) and, of what lies on the host, over gloo; on a CPU, and where
several share a device, over gloo alone. Gloo is bound to loopback, or, where ranks are on several machines, to the
interface by which this one reaches the leader's.
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
from torch.distributed import distributed_c10d as inner

from miles.cluster.team import Lost, Place

_INTERFACE = "GLOO_SOCKET_IFNAME"
# Linux's question for the address of an interface.
_SIOCGIFADDR = 0x8915

# What torch's errors of a broken group have in common, beside a class of their own that not all are of.
_BROKEN = ("gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer", "rocess group")


# Where ranks are on several machines: the sockets of this process, by descriptor and inode, before it met the others,
# and those that it has made since then, for them as far as can be told.
_before: set[tuple[int, int]] | None = None
_made: set[tuple[int, int]] = set()


def join(place: Place) -> torch.device:
    """Meet the others of the team; returns this rank's device, which is the current one from now on."""
    global _before
    _made.clear()
    _before = _sockets() if place.meeting else None
    device = torch.device(place.device)
    if device.type != "cpu":
        torch.cuda.set_device(device)
    os.environ.setdefault(_INTERFACE, _interface(place.meeting) if place.meeting else _loopback())
    limit = timedelta(seconds=place.patience)
    with told():
        store = _store(place, limit)
        store.set_timeout(limit)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type != "cpu" and place.apart else "gloo",
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=limit,
        )
    return device


def _store(place: Place, limit: timedelta) -> Store:
    """Where ranks leave word for each other before they are a group."""
    if not place.meeting:
        return FileStore(str(place.folder / "group"), place.world)
    host, _, port = place.meeting.rpartition(":")
    return TCPStore(host, int(port), place.world, is_master=place.rank == 0, timeout=limit, wait_for_workers=False)


def bound(seconds: float) -> None:
    """Give every group there is this deadline: torch's own for those made of the default group's ranks is another."""
    if _before is not None:
        _made.update(_sockets() - _before)
    for group in list(inner._world.pg_map):
        inner._set_pg_timeout(timedelta(seconds=seconds), group)


def abort() -> None:
    """End what is under way in any group, from whatever thread; they are of no more use, and still to be left.

    Gloo waits for a peer until its connection breaks, and that to a machine which is cut off never does: it is broken
    here. What else was connected in the meantime, such as a request that is under way, is tried again by its owner.
    """
    if _before is not None:
        now = _sockets()
        for descriptor, _ in (_made or now - _before) & now:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as way:
                if way.family in (socket.AF_INET, socket.AF_INET6) and way.getpeername():
                    way.shutdown(socket.SHUT_RDWR)
    for group in list(inner._world.pg_map):
        group.abort()


def _sockets() -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(name), about.st_ino))
    return found


def leave(*, broken: bool = False) -> None:
    """Take leave of the others, if they had been joined; of a ``broken`` group without a word to them."""
    if not dist.is_initialized():
        return
    if broken:
        inner._abort_process_group()
    else:
        dist.destroy_process_group()


@contextmanager
def told() -> Iterator[None]:
    """What all ranks do at once: that the group broke down is told as ``Lost``, and other errors as they are."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(word in str(error) for word in _BROKEN):
            raise Lost((str(error).splitlines() or ["the group broke down"])[0]) from error
        raise


def _loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _interface(meeting: str) -> str:
    """The interface of this machine's that leads to a host:port."""
    host, _, port = meeting.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
        way.connect((host, int(port)))  # sends nothing: it only finds the way
        own = way.getsockname()[0]
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            with suppress(OSError):  # an interface without an address
                if socket.inet_ntoa(fcntl.ioctl(way.fileno(), _SIOCGIFADDR, asked)[20:24]) == own:
                    return name
    return _loopback()
