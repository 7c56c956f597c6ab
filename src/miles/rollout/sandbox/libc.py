"""Linux syscalls that Python 3.11 has no function for, through ctypes."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000
ATTR_RDONLY = 0x1
ATTR_NOSUID = 0x2
ATTR_NODEV = 0x4

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_MNT_DETACH = 2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_CAPABILITIES_V3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("user_ns", ctypes.c_uint64),
    )


def syscall(name: str, number: int, *args: int | ctypes.Array[ctypes.c_char] | ctypes.c_char_p | None) -> int:
    """Make a syscall by number; ``name`` is for the error message."""
    passed = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _check(name, _libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *args: int) -> None:
    """Call prctl on this process."""
    values = (*args, 0, 0, 0, 0)[:4]
    _check(f"prctl {option}", _libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, values)))


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system, or bind-mount a path."""
    texts = [text.encode() if text else None for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None)
    _check(f"mount {kind or 'bind'} on {target}", done)


def restrict_mount(path: str, attributes: int, *, recursive: bool) -> None:
    """Add restrictions to a mount and, if ``recursive``, to those under it; existing ones stay."""
    attr = _MountAttr(set=attributes)
    flags = _AT_RECURSIVE if recursive else 0
    address, size = ctypes.addressof(attr), ctypes.sizeof(attr)
    syscall(f"mount_setattr on {path}", _MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(path.encode()), flags, address, size)


def pivot_root(new: str) -> None:
    """Make a mount the root, and detach the old root."""
    os.chdir(new)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], here, here)
    unmount(".")
    os.chdir("/")


def unmount(path: str) -> None:
    """Detach a mount; open files in it stay usable."""
    _check(f"umount {path}", _libc.umount2(path.encode(), _MNT_DETACH))


def drop_capabilities() -> None:
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    _check("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def set_hostname(name: str) -> None:
    """Set the host name of this UTS namespace."""
    _check("sethostname", _libc.sethostname(name.encode(), len(name)))


def _check(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result
