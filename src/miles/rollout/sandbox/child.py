"""Between fork and exec: the process locks itself in, one wall after the other, and becomes the program."""

from __future__ import annotations

import math
import os
import resource
import signal
from typing import NamedTuple, NoReturn

from miles.rollout.sandbox import filter, kernel, landlock
from miles.rollout.sandbox.jail import DEVICES, Ids
from miles.rollout.sandbox.order import Bounds, Order

OPEN_FILES = 128
_OUR_FILES = 1024  # more than the supervisor ever has open


class Place(NamedTuple):
    """Where the program runs and as whom; without ids it stays who we are.

    ``tasks`` is how many processes and threads its user may have, or None where that cannot be
    bounded, and then it may start none.
    """

    scratch: str
    ids: Ids | None
    tasks: int | None


def become(order: Order, place: Place, *, streams: tuple[int, int, int], fault: int) -> NoReturn:
    """Never returns: the program runs in this process's place, or ``fault`` is told why it cannot."""
    try:
        os.setsid()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(3, fault)
        os.closerange(fault + 1, _OUR_FILES)
        os.chdir(place.scratch)
        _reset_signals()
        _limit(order.bounds, place.tasks)
        if place.ids is not None:
            _change_identity(place.ids)
        kernel.drop_capabilities()
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if order.plan.landlock:
            readable = ("/",) if order.plan.namespaces else order.readable
            landlock.lock(order.plan.landlock, readable=readable, devices=DEVICES, writable=place.scratch)
        if order.plan.seccomp:
            filter.install(order.plan, may_fork=place.tasks is not None)
        os.execvpe(order.argv[0], order.argv, _environment(place.scratch))
    except Exception as error:  # whatever it is, there is no way on from here but to say so
        os.write(fault, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(125)


def _reset_signals() -> None:
    """Python ignores two signals, and what is ignored would stay ignored in the program."""
    for name in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(name, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _limit(bounds: Bounds, tasks: int | None) -> None:
    # time and memory with room above the limit, so that it is the watch which ends the program, and can say why
    seconds = math.ceil(bounds.cpu) + 1
    _set(resource.RLIMIT_CPU, seconds, seconds + 1)
    _set(resource.RLIMIT_AS, bounds.memory + bounds.memory // 2)
    _set(resource.RLIMIT_FSIZE, bounds.file)
    _set(resource.RLIMIT_NOFILE, OPEN_FILES)
    for none in (resource.RLIMIT_CORE, resource.RLIMIT_MEMLOCK, resource.RLIMIT_MSGQUEUE):
        _set(none, 0)
    if tasks is not None:
        _set(resource.RLIMIT_NPROC, tasks)


def _set(what: int, soft: int, hard: int | None = None) -> None:
    _, most = resource.getrlimit(what)
    wanted = soft if hard is None else hard
    ceiling = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(what, (min(soft, ceiling), ceiling))


def _change_identity(ids: Ids) -> None:
    if ids.groups:
        os.setgroups(())
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)


def _environment(scratch: str) -> dict[str, str]:
    """All of it: nothing of ours is handed down. Hashes are fixed, so that the same program prints the same."""
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
