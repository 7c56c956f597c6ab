"""Child setup between fork and exec: rlimits, credentials, Landlock, seccomp, then the program."""

from __future__ import annotations

import fcntl
import math
import os
import resource
import signal
from typing import NamedTuple, NoReturn

from miles.rollout.sandbox import landlock, libc, seccomp
from miles.rollout.sandbox.namespaces import DEVICES, Ids
from miles.rollout.sandbox.protocol import RunRequest, SandboxLimits

OPEN_FILES = 128
_OUR_FILES = 128  # more than the supervisor ever has open


class ChildSetup(NamedTuple):
    """Where the program runs and as which user; without ids it keeps ours.

    ``tasks`` is how many processes and threads its user may have, or None where the kernel cannot limit that; the
    program may then start none.
    """

    scratch: str
    ids: Ids | None
    tasks: int | None


def exec_program(
    request: RunRequest, argv: tuple[str, ...], setup: ChildSetup, *, streams: tuple[int, ...], fault: int
) -> NoReturn:
    """Replace this process by a program with only ``streams`` open, and never return.

    A failure is written to the pipe ``fault``, which a successful exec closes.
    """
    try:
        os.setsid()
        fault = _place_descriptors(streams, fault)
        os.chdir(setup.scratch)
        _reset_signals()
        _set_rlimits(request.limits, setup.tasks)
        if setup.ids is not None:
            _change_identity(setup.ids)
        libc.drop_capabilities()
        libc.prctl(libc.PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
        if request.plan.landlock:
            readable = ("/",) if request.plan.namespaces else request.readable
            landlock.restrict_self(request.plan.landlock, readable=readable, devices=DEVICES, writable=setup.scratch)
        if request.plan.seccomp:
            seccomp.install(request.plan, may_fork=setup.tasks is not None)
        os.execvpe(argv[0], argv, _environment(setup.scratch))
    except Exception as error:  # reported to the supervisor; there is nothing else to do
        os.write(fault, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(125)


def _place_descriptors(streams: tuple[int, ...], fault: int) -> int:
    """Make ``streams`` the descriptors 0, 1, 2 and so on, ``fault`` the next, which is returned; close all others."""
    above = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _OUR_FILES) for each in (*streams, fault)]
    for target, each in enumerate(above):
        os.dup2(each, target, inheritable=target < len(streams))
    os.closerange(len(above), 2 * _OUR_FILES)
    return len(streams)


def _reset_signals() -> None:
    """Restore the signals that the supervisor ignores, since ignored signals stay ignored after exec."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _set_rlimits(limits: SandboxLimits, tasks: int | None) -> None:
    # CPU time and memory leave slack, so that the monitor ends the program and can report the reason
    seconds = math.ceil(limits.cpu) + 1
    _set_rlimit(resource.RLIMIT_CPU, seconds, seconds + 1)
    _set_rlimit(resource.RLIMIT_AS, limits.memory + limits.memory // 2)
    _set_rlimit(resource.RLIMIT_FSIZE, limits.file)
    _set_rlimit(resource.RLIMIT_NOFILE, OPEN_FILES)
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _set_rlimit(none, 0)
    if tasks is not None:
        _set_rlimit(resource.RLIMIT_NPROC, tasks)


def _set_rlimit(kind: int, soft: int, hard: int | None = None) -> None:
    _, most = resource.getrlimit(kind)
    wanted = soft if hard is None else hard
    ceiling = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(kind, (min(soft, ceiling), ceiling))


def _change_identity(ids: Ids) -> None:
    if ids.groups:
        os.setgroups(())
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)


def _environment(scratch: str) -> dict[str, str]:
    """The program's whole environment. The hash seed is fixed, so that the same program prints the same."""
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": scratch,
        "TMPDIR": scratch,
        "USER": "nobody",
        "LOGNAME": "nobody",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "MALLOC_ARENA_MAX": "2",
    }
