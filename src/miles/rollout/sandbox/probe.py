"""Probe of isolation mechanisms: tries each in a child process and prints the errors; runs in a small interpreter."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from miles.rollout.sandbox import landlock, libc, namespaces, seccomp
from miles.rollout.sandbox.protocol import IsolationPlan, Namespaces


def main() -> None:
    """Standard input holds the readable paths, the program's interpreter among them, as a JSON list."""
    readable: list[str] = json.load(sys.stdin)
    report = {
        "landlock": landlock.version(),
        "seccomp": try_in_child(_try_seccomp),
        "user": try_in_child(lambda: _try_namespaces("user", readable)),
        "root": try_in_child(lambda: _try_namespaces("root", readable)),
        "apart": try_in_child(lambda: _try_separate_user(readable)),
    }
    os.write(1, json.dumps(report).encode())


def try_in_child(action: Callable[[], None]) -> str:
    """Run ``action`` in a child process; returns its error, or an empty string."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            action()
            os.write(write_end, b"+")
        except Exception as error:  # any error is the reason this mechanism is unavailable
            os.write(write_end, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(write_end)
    text = os.read(read_end, 1 << 12).decode(errors="replace")
    os.close(read_end)
    os.waitpid(child, 0)
    return "" if text == "+" else text or "the child ended without output"


def _try_seccomp() -> None:
    libc.prctl(libc.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.install(IsolationPlan(seccomp=True), may_fork=True)


def _try_namespaces(kind: Namespaces, readable: Sequence[str]) -> None:
    ids = namespaces.enter(kind)

    def build() -> None:
        namespaces.build_root(readable, scratch_bytes=1 << 20, ids=ids)
        os.setresgid(ids.gid, ids.gid, ids.gid)
        os.setresuid(ids.uid, ids.uid, ids.uid)

    if problem := try_in_child(build):
        raise OSError(problem)


def _try_separate_user(readable: Sequence[str]) -> None:
    """Whether another user can read what a program needs: root's Python is often in root's home, closed to others."""
    ids = namespaces.spare_ids()
    os.setgroups(())
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)
    for path in readable:
        os.stat(path)
    if not os.access(sys.executable, os.R_OK | os.X_OK):
        raise OSError(f"{sys.executable} is closed to other users")
