"""Tries each wall on this machine, in a process of its own, and prints which stood; run in a small interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from miles.rollout.sandbox import filter, jail, kernel, landlock
from miles.rollout.sandbox.order import Namespaces, Plan


def main() -> None:
    """Standard input holds the readable paths, the program's interpreter among them, as a JSON list."""
    readable: list[str] = json.load(sys.stdin)
    report = {
        "landlock": landlock.version(),
        "seccomp": tried(_filter),
        "user": tried(lambda: _separate("user", readable)),
        "root": tried(lambda: _separate("root", readable)),
        "apart": tried(lambda: _apart(readable)),
    }
    os.write(1, json.dumps(report).encode())


def tried(act: Callable[[], None]) -> str:
    """What stood in the way of an act done by a child of this process; empty when nothing did."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            act()
            os.write(tell, b"+")
        except Exception as error:  # whatever it is, it is why this wall cannot be had
            os.write(tell, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(tell)
    text = os.read(told, 1 << 12).decode(errors="replace")
    os.close(told)
    os.waitpid(child, 0)
    return "" if text == "+" else text or "it ended without a word"


def _filter() -> None:
    kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
    filter.install(Plan(seccomp=True), may_fork=True)


def _separate(kind: Namespaces, readable: Sequence[str]) -> None:
    ids = jail.enter(kind)

    def build() -> None:
        jail.build(readable, scratch_bytes=1 << 20, ids=ids)
        os.setresgid(ids.gid, ids.gid, ids.gid)
        os.setresuid(ids.uid, ids.uid, ids.uid)

    if problem := tried(build):
        raise OSError(problem)


def _apart(readable: Sequence[str]) -> None:
    """Can another user read what a program needs? Root's Python is often in root's home, which is closed to others."""
    ids = jail.spare_ids()
    os.setgroups(())
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)
    for path in readable:
        os.stat(path)
    if not os.access(sys.executable, os.R_OK | os.X_OK):
        raise OSError(f"{sys.executable} is closed to other users")
