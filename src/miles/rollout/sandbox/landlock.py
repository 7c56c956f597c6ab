"""Landlock: unprivileged file access control; the process may use only the named paths (Linux 5.13)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from miles.rollout.sandbox.libc import syscall

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_ASK_VERSION = 1
_BENEATH = 1

_EXECUTE = 1 << 0
_WRITE = 1 << 1
_READ = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_MAKE_CHAR = 1 << 6
_MAKE_SOCK = 1 << 9
_MAKE_BLOCK = 1 << 11

_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # number of access rights an ABI version knows; 16 from version 5 on
_TCP = 0b11  # bind and connect, known from version 4 on
_OUTSIDE = 0b11  # abstract sockets and signals of processes outside, known from version 6 on
SCOPES_SIGNALS = 6


def version() -> int:
    """The kernel's Landlock ABI version; 0 without Landlock."""
    try:
        return syscall("landlock_create_ruleset", _CREATE_RULESET, None, 0, _ASK_VERSION)
    except OSError:
        return 0


def restrict_self(abi: int, *, readable: Iterable[str], devices: Iterable[str], writable: str) -> None:
    """Allow only: read and execute under ``readable``, read and write ``devices``, everything under ``writable``."""
    every = (1 << _RIGHTS.get(abi, 16)) - 1
    fields = (every, *((_TCP,) if abi >= 4 else ()), *((_OUTSIDE,) if abi >= SCOPES_SIGNALS else ()))
    attr = ctypes.create_string_buffer(struct.pack(f"<{len(fields)}Q", *fields))
    rules = syscall("landlock_create_ruleset", _CREATE_RULESET, attr, 8 * len(fields), 0)
    for path in readable:
        _allow(rules, path, _EXECUTE | _READ | _READ_DIR)
    for path in devices:
        _allow(rules, path, (_READ | _WRITE | _TRUNCATE) & every)
    _allow(rules, writable, every & ~(_IOCTL | _MAKE_CHAR | _MAKE_BLOCK | _MAKE_SOCK))
    syscall("landlock_restrict_self", _RESTRICT_SELF, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # a system folder that is missing or unreachable needs no rule
    try:
        if not os.path.isdir(path):
            rights &= _ON_FILES
        attr = ctypes.create_string_buffer(struct.pack("<Qi", rights, place))
        syscall(f"landlock_add_rule for {path}", _ADD_RULE, rules, _BENEATH, attr, 0)
    finally:
        os.close(place)
