"""Namespaces and a root of its own: a world in which what must not be touched does not exist.

The new root holds the readable folders (read-only), five devices, and a scratch folder in memory of
bounded size. There is no network, no other process, no ``/proc``, no home. It all goes when its last process does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from miles.rollout.sandbox import kernel
from miles.rollout.sandbox.order import Namespaces

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INODES = 4096  # files and folders the scratch folder may hold

_SEPARATE = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
_INNER_ID = 1000
_NOBODY = 65534
_SPARE = 0x70000000  # ids from here on belong to nobody, so that one program is not another's neighbour


class Ids(NamedTuple):
    """Who the program is to be; ``groups`` says the list of further groups may be emptied too."""

    uid: int
    gid: int
    groups: bool


def spare_ids() -> Ids:
    """A user and a group of this process's own choice that own nothing here; only root can become them."""
    return Ids(_spare("/proc/self/uid_map"), _spare("/proc/self/gid_map"), True)


def enter(kind: Namespaces) -> Ids:
    """Separate this process's children from the machine; who the program should be inside."""
    if kind == "root":
        kernel.unshare(_SEPARATE)
        return spare_ids()
    if os.geteuid() == 0:
        return _enter_as_root()
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(_SEPARATE | kernel.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{_INNER_ID} {gid} 1")
    return Ids(_INNER_ID, _INNER_ID, False)


def _enter_as_root() -> Ids:
    """Root stays root inside, where that means little, and the program gets an id that is nobody's outside.

    Two ids can only be mapped by a process that is still outside.
    """
    ids, me = spare_ids(), os.getpid()
    wait, go = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        failed = 1
        try:
            os.close(go)
            if os.read(wait, 1):
                _write(f"/proc/{me}/uid_map", f"0 0 1\n{_INNER_ID} {ids.uid} 1\n")
                _write(f"/proc/{me}/gid_map", f"0 0 1\n{_INNER_ID} {ids.gid} 1\n")
                failed = 0
        finally:
            os._exit(failed)
    try:
        kernel.unshare(_SEPARATE | kernel.CLONE_NEWUSER)
        os.write(go, b"!")
    finally:
        os.close(go)
        os.close(wait)
        _, status = os.waitpid(mapper, 0)
    if status:
        raise OSError(1, "uid_map: user ids cannot be mapped")
    return Ids(_INNER_ID, _INNER_ID, True)


def build(readable: Sequence[str], *, scratch_bytes: int, ids: Ids) -> int | None:
    """Make the new root and move into it; the first process of the namespaces does this.

    Gives an open folder of processes, in which only those of the namespace are, or None where none can be had.
    """
    kernel.mount("", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _outermost(readable)}
    sources |= {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in DEVICES}
    root = next(path for path in ("/tmp", "/mnt", "/var", "/run", "/etc") if os.path.isdir(path))
    kernel.mount("tmpfs", root, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=0755")
    for path, source in sources.items():
        _show(source, root + path, device=path in DEVICES)
        os.close(source)
    for path in filter(os.path.islink, readable):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    _make_scratch(root, scratch_bytes, ids)
    processes = _processes(root)
    kernel.swap_root(root)
    kernel.restrict_mount("/", kernel.ATTR_RDONLY, recursive=False)
    kernel.set_hostname("sandbox")
    return processes


def _show(source: int, target: str, *, device: bool) -> None:
    """Bind an open file or folder, read-only with all that is mounted below it."""
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    kernel.mount(f"/proc/self/fd/{source}", target, "", kernel.MS_BIND | kernel.MS_REC)
    restrictions = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | (0 if device else kernel.ATTR_NODEV)
    kernel.restrict_mount(target, restrictions, recursive=True)


def _make_scratch(root: str, size: int, ids: Ids) -> None:
    os.mkdir(root + SCRATCH)
    bounds = f"size={max(size, 4096)},nr_inodes={INODES},mode=0700,uid={ids.uid},gid={ids.gid}"
    kernel.mount("tmpfs", root + SCRATCH, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, bounds)
    for place in ("/tmp", "/dev/shm"):
        os.symlink(SCRATCH, root + place)


def _processes(root: str) -> int | None:
    place = f"{root}/proc"
    os.mkdir(place)
    try:
        kernel.mount("proc", place, "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    except OSError:
        return None  # where a container hides parts of /proc, a whole one cannot be mounted
    folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    kernel.unmount(place)
    return folder


def _outermost(paths: Iterable[str]) -> list[str]:
    """The paths that exist, are no links and are not inside another."""
    kept: list[str] = []
    for path in sorted(path for path in set(paths) if os.path.exists(path) and not os.path.islink(path)):
        if not kept or not path.startswith(f"{kept[-1]}/"):
            kept.append(path)
    return kept


def _spare(mapping: str) -> int:
    wanted = _SPARE + os.getpid()
    with open(mapping, encoding="ascii") as lines:
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
    for identity in (wanted, _NOBODY):
        if any(first <= identity < first + count for first, count in ranges):
            return identity
    return max(first + count for first, count in ranges) - 1


def _write(path: str, text: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)
