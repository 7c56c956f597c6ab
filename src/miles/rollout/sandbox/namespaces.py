"""Namespaces and a private root file system for sandboxed programs.

The new root holds the readable folders (read-only), five devices, and a scratch folder in memory of bounded size.
There is no network, no other process, no ``/proc``, no home. It all disappears with its last process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from miles.rollout.sandbox import libc
from miles.rollout.sandbox.protocol import Namespaces

SCRATCH = "/scratch"
SOURCE = "/miles-source"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
INODES = 4096  # files and folders the scratch folder may hold

_SEPARATE = libc.CLONE_NEWNS | libc.CLONE_NEWPID | libc.CLONE_NEWNET | libc.CLONE_NEWIPC | libc.CLONE_NEWUTS
_INNER_ID = 1000
_NOBODY = 65534
_SPARE = 0x70000000  # unused ids from here on, one per process, so that programs do not share a user


class Ids(NamedTuple):
    """User and group of the program; ``groups`` says that supplementary groups can be dropped too."""

    uid: int
    gid: int
    groups: bool


def spare_ids(offset: int | None = None) -> Ids:
    """A user and a group that own nothing here, from the process id or ``offset``; only root can switch to them."""
    number = os.getpid() if offset is None else offset
    return Ids(_spare("/proc/self/uid_map", number), _spare("/proc/self/gid_map", number), True)


def enter(kind: Namespaces) -> Ids:
    """Enter new namespaces; returns the ids the program gets inside."""
    if kind == "root":
        libc.unshare(_SEPARATE)
        return spare_ids()
    if os.geteuid() == 0:
        return _enter_as_root()
    uid, gid = os.geteuid(), os.getegid()
    libc.unshare(_SEPARATE | libc.CLONE_NEWUSER)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{_INNER_ID} {uid} 1")
    _write("/proc/self/gid_map", f"{_INNER_ID} {gid} 1")
    return Ids(_INNER_ID, _INNER_ID, False)


def _enter_as_root() -> Ids:
    """Map root to root and the program to an id that owns nothing outside.

    Only a process that is still outside can map two ids.
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
        libc.unshare(_SEPARATE | libc.CLONE_NEWUSER)
        os.write(go, b"!")
    finally:
        os.close(go)
        os.close(wait)
        _, status = os.waitpid(mapper, 0)
    if status:
        raise OSError(1, "uid_map: user ids cannot be mapped")
    return Ids(_INNER_ID, _INNER_ID, True)


def build_root(readable: Sequence[str], *, scratch_bytes: int, ids: Ids) -> int | None:
    """Build the new root and pivot into it, as the first process of the namespaces.

    Returns an open ``/proc`` directory that shows only the namespace's processes, or None where none can be mounted.
    """
    libc.mount("", "/", "", libc.MS_REC | libc.MS_PRIVATE)
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _outermost(readable)}
    sources |= {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in DEVICES}
    root = next(path for path in ("/tmp", "/mnt", "/var", "/run", "/etc") if os.path.isdir(path))
    libc.mount("tmpfs", root, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, "size=1m,mode=0755")
    for path, source in sources.items():
        _bind(source, root + path, device=path in DEVICES)
        os.close(source)
    for path in filter(os.path.islink, readable):
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(os.readlink(path), root + path)
    _mount_scratch(root, scratch_bytes, ids)
    processes = _open_proc(root)
    libc.pivot_root(root)
    libc.restrict_mount("/", libc.ATTR_RDONLY, recursive=False)
    libc.set_hostname("sandbox")
    return processes


def finish_bubblewrap_root(*, scratch_bytes: int, ids: Ids) -> int:
    """Complete the root that bwrap built, as its first process; returns its open ``/proc``, which is then unmounted.

    The source of this package, which only the supervisor needs, is unmounted too.
    """
    processes = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _mount_scratch("", scratch_bytes, ids)
    for path in ("/proc", SOURCE):
        libc.unmount(path)
    libc.restrict_mount("/", libc.ATTR_RDONLY, recursive=False)
    return processes


def bubblewrap_ids() -> Ids:
    """The program's ids in bwrap's namespaces: of its own if root started it, else the mapped ones."""
    if os.geteuid() == 0:
        return spare_ids(int.from_bytes(os.urandom(3), "big"))
    return Ids(_INNER_ID, _INNER_ID, False)


def bubblewrap_arguments(readable: Sequence[str], source: str) -> list[str]:
    """Options of bwrap for the same root and namespaces as ``build_root``; ``source`` holds this package."""
    mapped = ("--unshare-user", "--uid", str(_INNER_ID), "--gid", str(_INNER_ID)) if os.geteuid() else ()
    apart = ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox")
    # The capabilities are the supervisor's, to finish the root; a program drops them all.
    arguments = [*mapped, *apart, "--die-with-parent", "--as-pid-1", "--cap-add", "ALL", "--proc", "/proc"]
    outermost = _outermost(readable)
    for folder in _parents((*outermost, *DEVICES)):
        arguments += ["--perms", "0755", "--dir", folder]
    for path in outermost:
        arguments += ["--ro-bind", path, path]
    for path in filter(os.path.islink, readable):
        arguments += ["--symlink", os.readlink(path), path]
    for path in DEVICES:
        arguments += ["--dev-bind", path, path]
    return [*arguments, "--ro-bind", source, SOURCE]


def _bind(source: int, target: str, *, device: bool) -> None:
    """Bind-mount an open file or folder read-only, with all mounts below it."""
    if os.path.isdir(f"/proc/self/fd/{source}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
    libc.mount(f"/proc/self/fd/{source}", target, "", libc.MS_BIND | libc.MS_REC)
    restrictions = libc.ATTR_RDONLY | libc.ATTR_NOSUID | (0 if device else libc.ATTR_NODEV)
    libc.restrict_mount(target, restrictions, recursive=True)


def _mount_scratch(root: str, size: int, ids: Ids) -> None:
    os.mkdir(root + SCRATCH)
    bounds = f"size={max(size, 4096)},nr_inodes={INODES},mode=0700,uid={ids.uid},gid={ids.gid}"
    libc.mount("tmpfs", root + SCRATCH, "tmpfs", libc.MS_NOSUID | libc.MS_NODEV, bounds)
    for path in ("/tmp", "/dev/shm"):
        os.symlink(SCRATCH, root + path)


def _open_proc(root: str) -> int | None:
    path = f"{root}/proc"
    os.mkdir(path)
    try:
        libc.mount("proc", path, "proc", libc.MS_NOSUID | libc.MS_NODEV | libc.MS_NOEXEC)
    except OSError:
        return None  # the kernel refuses a full /proc where a container masks parts of its own
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    libc.unmount(path)
    return folder


def _outermost(paths: Iterable[str]) -> list[str]:
    """The existing paths that are not links and not inside another one."""
    kept: list[str] = []
    for path in sorted(path for path in set(paths) if os.path.exists(path) and not os.path.islink(path)):
        if not kept or not path.startswith(f"{kept[-1]}/"):
            kept.append(path)
    return kept


def _parents(paths: Iterable[str]) -> list[str]:
    """All folders above these paths, outer ones first, without the root."""
    found: set[str] = set()
    for path in paths:
        while (path := os.path.dirname(path)) != "/":
            found.add(path)
    return sorted(found)


def _spare(mapping: str, offset: int) -> int:
    wanted = _SPARE + offset
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
