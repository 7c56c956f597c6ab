"""The seccomp filter: which system calls the program may make, as a classic BPF program written by hand.

A call is on the list, or on the list with some arguments only, or it does not exist. The program cannot
take the filter off, and whatever it starts inherits it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from miles.rollout.sandbox import calls, kernel
from miles.rollout.sandbox.landlock import SCOPES_SIGNALS
from miles.rollout.sandbox.order import Plan

ARCHITECTURES: Mapping[str, int] = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_LOAD, _AND, _JUMP_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCHITECTURE, _ARGS = 0, 4, 16  # where the filter finds them
_WORD = 0xFFFFFFFF

_NEW_NAMESPACES = 0x7E020080
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_KIND = 1, 1, 5, 0xF
_ACCESS, _TRUNCATE = 0o3, 0o1000
# get and set flags, locks of files, sizes of pipes; not the owner of a file's signals
_FCNTL = (*range(8), 36, 37, 38, 1030, 1031, 1032)
# terminal settings and size (read), bytes waiting, non-blocking, close-on-exec
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# dumpable (read), thread names, capabilities (read), names of memory areas
_PRCTL = (3, 15, 16, 23, 0x53564D41)


class Check(NamedTuple):
    """A 32-bit word of an argument, masked, must be one of these values."""

    arg: int
    values: tuple[int, ...]
    mask: int = _WORD
    high: bool = False


class Rule(NamedTuple):
    """A call that is let through when every check holds, and otherwise answers ``error``."""

    checks: tuple[Check, ...]
    error: int = errno.EPERM


NEVER = Check(0, ())
Instruction = tuple[int, int, int, int]


def rules(plan: Plan, *, pid: int, may_fork: bool) -> dict[str, Rule]:
    """Calls that are looked at more closely. ``pid`` is the program's own."""
    opening = (0, 1, 2, 1 | _TRUNCATE, 2 | _TRUNCATE)  # truncation only of what is opened for writing
    fork = Rule((), errno.EAGAIN) if may_fork else Rule((NEVER,), errno.EAGAIN)
    known = {
        "open": Rule((Check(1, opening, _ACCESS | _TRUNCATE),)),
        "openat": Rule((Check(2, opening, _ACCESS | _TRUNCATE),)),
        "clone": Rule((Check(0, (0,), _NEW_NAMESPACES),)) if may_fork else fork,
        "fork": fork,
        "vfork": fork,
        "socket": Rule((NEVER,)),
        # a connected pair only: a datagram socket could be pointed elsewhere by each message
        "socketpair": Rule((Check(0, (_AF_UNIX,)), Check(1, (_SOCK_STREAM, _SOCK_SEQPACKET), _SOCK_KIND))),
        "sendto": Rule((Check(4, (0,)), Check(4, (0,), high=True))),
        "prlimit64": Rule((Check(0, (0,)),)),
        "prctl": Rule((Check(0, _PRCTL),)),
        "ioctl": Rule((Check(1, _IOCTL),)),
        "fcntl": Rule((Check(1, _FCNTL),)),
    }
    if plan.namespaces or plan.apart or plan.landlock >= SCOPES_SIGNALS:  # its signals reach only its own kind
        return known | dict.fromkeys(("kill", "tkill", "tgkill"), Rule(()))
    return known | {"kill": Rule((Check(0, (0, pid)),)), "tgkill": Rule((Check(0, (pid,)),)), "tkill": Rule((NEVER,))}


def assembled(machine: str, plan: Plan, *, pid: int, may_fork: bool) -> list[Instruction]:
    """The filter's instructions."""
    plain = dict(calls.numbers(calls.PLAIN, machine))
    if plan.namespaces:
        plain |= calls.numbers(calls.INSIDE, machine)
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 1, 0, ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    for number in sorted(plain.values()):
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    closer = rules(plan, pid=pid, may_fork=may_fork)
    for name, number in calls.numbers(calls.CHECKED, machine).items():
        body = _body(closer[name])
        code += [(_JUMP_EQUAL, 0, len(body), number), *body]
    return [*code, (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]


def install(plan: Plan, *, may_fork: bool) -> None:
    """Filter this process from here on; needs no_new_privs."""
    code = assembled(os.uname().machine, plan, pid=os.getpid(), may_fork=may_fork)
    body = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(body)))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(program))


def _body(rule: Rule) -> Sequence[Instruction]:
    refuse: Instruction = (_RETURN, 0, 0, _ERROR | rule.error)
    body: list[Instruction] = []
    for check in rule.checks:
        body.append((_LOAD, 0, 0, _ARGS + 8 * check.arg + 4 * check.high))
        if check.mask != _WORD:
            body.append((_AND, 0, 0, check.mask))
        count = len(check.values)
        body += [(_JUMP_EQUAL, count - at, 0, value) for at, value in enumerate(check.values)]
        body.append(refuse)
    return [*body, (_RETURN, 0, 0, _ALLOW)]
