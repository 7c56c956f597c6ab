"""The few doors into the kernel that Python 3.11 has no function for."""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 0x2, 0x4, 0x8, 0x1000, 0x4000, 0x40000
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 0x1, 0x2, 0x4

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

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


def syscall(what: str, number: int, *args: int | ctypes.Array[ctypes.c_char] | ctypes.c_char_p | None) -> int:
    """A system call by its number; ``what`` is for the error."""
    passed = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(what, _libc.syscall(ctypes.c_long(number), *passed))


def prctl(option: int, *args: int) -> None:
    """Change something about this process."""
    values = (*args, 0, 0, 0, 0)[:4]
    _checked(f"prctl {option}", _libc.prctl(ctypes.c_int(option), *map(ctypes.c_ulong, values)))


def unshare(flags: int) -> None:
    """Leave namespaces for new ones."""
    _checked("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mount a file system, or bind a part of one to another place."""
    texts = [text.encode() if text else None for text in (source, target, kind)]
    done = _libc.mount(*texts, ctypes.c_ulong(flags), data.encode() if data else None)
    _checked(f"mount {kind or 'bind'} on {target}", done)


def restrict_mount(path: str, attributes: int, *, recursive: bool) -> None:
    """Add restrictions to a mount, and to those under it; what it has already stays."""
    attr = _MountAttr(set=attributes)
    flags = _AT_RECURSIVE if recursive else 0
    address, size = ctypes.addressof(attr), ctypes.sizeof(attr)
    syscall(f"mount_setattr on {path}", _MOUNT_SETATTR, _AT_FDCWD, ctypes.c_char_p(path.encode()), flags, address, size)


def swap_root(new: str) -> None:
    """Make a mount the root, and let go of the old one."""
    os.chdir(new)
    here = ctypes.c_char_p(b".")
    syscall("pivot_root", _PIVOT_ROOT[os.uname().machine], here, here)
    unmount(".")
    os.chdir("/")


def unmount(path: str) -> None:
    """Take a mount out of the tree; open files in it stay usable."""
    _checked(f"umount {path}", _libc.umount2(path.encode(), _MNT_DETACH))


def drop_capabilities() -> None:
    """Give up every capability."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_V3, 0)
    _checked("capset", _libc.capset(header, (ctypes.c_uint32 * 6)()))


def set_hostname(name: str) -> None:
    """Name the machine, in this namespace."""
    _checked("sethostname", _libc.sethostname(name.encode(), len(name)))


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
