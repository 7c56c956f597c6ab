"""Which walls this machine has, whether they are enough, and which to build."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from miles.core.errors import UsageError
from miles.rollout.sandbox.filter import ARCHITECTURES
from miles.rollout.sandbox.limits import SandboxError
from miles.rollout.sandbox.order import Plan

# what programs are run with: libraries and tools of the system, and nothing that may hold anyone's work
_SYSTEM = (
    *("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/nix/store"),
    *("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec", "/usr/share/zoneinfo", "/usr/share/locale"),
    *("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"),
)
_PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What stood when it was tried: Landlock's version, and of each other wall what was in its way, if anything."""

    landlock: int
    seccomp: str
    user: str
    root: str
    apart: str


def interpreter() -> str:
    """The Python that programs are run with: the one that runs us, without its environment of packages."""
    return os.path.realpath(sys.executable)


def readable_paths() -> tuple[str, ...]:
    """All that a program may read outside its scratch folder."""
    own = [interpreter(), *(os.path.realpath(f"{prefix}/lib") for prefix in (sys.base_prefix, sys.base_exec_prefix))]
    return tuple(dict.fromkeys(path for path in (*_SYSTEM, *own) if os.path.exists(path)))


def supervisor_command(module: str) -> list[str]:
    """How a small interpreter is started that runs ``main`` of one of this room's modules."""
    source = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.append({source!r}); from miles.rollout.sandbox.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


def find() -> Found:
    """Try every wall. Takes a tenth of a second."""
    asked = json.dumps(readable_paths())
    command = supervisor_command("probe")
    done = subprocess.run(command, input=asked.encode(), capture_output=True, env={}, timeout=_PROBE_SECONDS)
    if done.returncode:
        raise SandboxError(f"The sandbox could not be tried out: {last_line(done.stderr)}.")
    return Found(**json.loads(done.stdout))


def choose(found: Found) -> Plan:
    """The strongest walls that stand here."""
    kind = "user" if not found.user else "root" if not found.root else ""
    return Plan(
        namespaces=kind,
        landlock=found.landlock,
        seccomp=not found.seccomp,
        apart=not found.apart and not kind,
    )


def missing(found: Found) -> str | None:
    """What keeps this machine below the minimum, with the mend; None when it is met.

    The minimum: seccomp, which takes away the network and other processes, and namespaces or Landlock, which take
    away the files.
    """
    if found.seccomp:
        return (
            f"seccomp is missing ({found.seccomp}): use a kernel with CONFIG_SECCOMP_FILTER, or a container whose "
            "profile allows prctl(PR_SET_SECCOMP)"
        )
    if choose(found).namespaces or found.landlock:
        return None
    return (
        f"namespaces ({found.user}) and Landlock are both missing, so files could not be guarded: use Linux 5.13 or "
        "newer with Landlock on, or allow user namespaces (sysctl user.max_user_namespaces, or in a container "
        "--security-opt seccomp=unconfined)"
    )


def plan_here(*, unsandboxed: bool) -> Plan:
    """The walls to build on this machine; UsageError when they are too few and nobody said that is all right."""
    system, machine = sys.platform, os.uname().machine
    if system != "linux" or machine not in ARCHITECTURES:
        raise UsageError(
            f"Programs written by a model are run on Linux on x86-64 or arm64 only, not on {system} on {machine}; "
            "use another --rm-type, or run Miles in a Linux container."
        )
    found = find()
    if not unsandboxed and (problem := missing(found)):
        raise UsageError(
            f"Programs written by a model cannot be run safely here, because {problem}; or accept the risk with "
            "--allow-unsandboxed-code."
        )
    return choose(found)


def last_line(text: bytes) -> str:
    """The last of what a process complained about."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
