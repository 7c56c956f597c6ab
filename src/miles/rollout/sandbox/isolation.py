"""Isolation mechanisms of this machine: probe them, check the minimum, choose a plan."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from miles.core.errors import MilesError, UsageError
from miles.rollout.sandbox.namespaces import SOURCE, bubblewrap_arguments
from miles.rollout.sandbox.protocol import IsolationPlan, SandboxBackend
from miles.rollout.sandbox.seccomp import ARCHITECTURES

# read-only system paths with libraries and tools, and nothing that may hold user data
_SYSTEM = (
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/nix/store",
    "/usr/bin",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/libexec",
    "/usr/share/zoneinfo",
    "/usr/share/locale",
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/alternatives",
)
_PROBE_SECONDS = 60.0


class SandboxError(MilesError):
    """The sandbox itself failed; the program was not run, or its outcome is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationProbe:
    """Result of the probe: Landlock's ABI version, and for each other mechanism the error that prevents it, or ''."""

    landlock: int
    seccomp: str
    user: str
    root: str
    apart: str


def interpreter() -> str:
    """The Python that runs programs: ours, without its installed packages."""
    return os.path.realpath(sys.executable)


def readable_paths() -> tuple[str, ...]:
    """All paths a program may read outside its scratch folder."""
    own = [interpreter(), *(os.path.realpath(f"{prefix}/lib") for prefix in (sys.base_prefix, sys.base_exec_prefix))]
    return tuple(dict.fromkeys(path for path in (*_SYSTEM, *own) if os.path.exists(path)))


def supervisor_command(module: str) -> list[str]:
    """The command of a small interpreter that runs ``main`` of a module of this package."""
    source = str(Path(__file__).parents[3])
    code = f"import sys; sys.path.append({source!r}); from miles.rollout.sandbox.{module} import main; main()"
    return [sys.executable, "-I", "-S", "-c", code]


def start_command(plan: IsolationPlan) -> list[str]:
    """The command of the supervisor of one run."""
    if plan.namespaces != "bubblewrap":
        return supervisor_command("supervisor")
    code = f"import sys; sys.path.append({SOURCE!r}); from miles.rollout.sandbox.supervisor import main; main()"
    arguments = bubblewrap_arguments(readable_paths(), str(Path(__file__).parents[3]))
    return [shutil.which("bwrap") or "bwrap", *arguments, interpreter(), "-I", "-S", "-B", "-c", code]


def probe_isolation() -> IsolationProbe:
    """Try every mechanism. Takes a tenth of a second."""
    paths = json.dumps(readable_paths())
    command = supervisor_command("probe")
    done = subprocess.run(command, input=paths.encode(), capture_output=True, env={}, timeout=_PROBE_SECONDS)
    if done.returncode:
        raise SandboxError(f"The sandbox probe failed: {last_line(done.stderr)}.")
    return IsolationProbe(**json.loads(done.stdout))


def choose_plan(found: IsolationProbe) -> IsolationPlan:
    """The strongest available isolation."""
    kind = "user" if not found.user else "root" if not found.root else ""
    return IsolationPlan(
        namespaces=kind,
        landlock=found.landlock,
        seccomp=not found.seccomp,
        apart=not found.apart and not kind,
    )


def find_missing(found: IsolationProbe) -> str | None:
    """What keeps this machine below the minimum, and how to fix it; None when the minimum is met.

    The minimum: seccomp, which removes the network and access to other processes, and namespaces or Landlock, which
    protect files.
    """
    if found.seccomp:
        return (
            f"seccomp is missing ({found.seccomp}): use a kernel with CONFIG_SECCOMP_FILTER, or a container whose "
            "profile allows prctl(PR_SET_SECCOMP)"
        )
    if choose_plan(found).namespaces or found.landlock:
        return None
    return (
        f"namespaces ({found.user}) and Landlock are both missing, so files cannot be protected: use Linux 5.13 or "
        "newer with Landlock on, or allow user namespaces (sysctl user.max_user_namespaces, or in a container "
        "--security-opt seccomp=unconfined)"
    )


def plan_isolation(*, unsandboxed: bool, backend: SandboxBackend = "native") -> IsolationPlan:
    """Choose the isolation for this machine; UsageError when it is below the minimum and ``unsandboxed`` is not set."""
    system, machine = sys.platform, os.uname().machine
    if system != "linux" or machine not in ARCHITECTURES:
        raise UsageError(
            f"Programs written by a model are run on Linux on x86-64 or arm64 only, not on {system} on {machine}; "
            "use another --rm-type, or run Miles in a Linux container."
        )
    found = probe_isolation()
    if backend == "bubblewrap":
        return _plan_bubblewrap(found)
    if not unsandboxed and (problem := find_missing(found)):
        raise UsageError(
            f"Programs written by a model cannot be run safely here, because {problem}; or accept the risk with "
            "--allow-unsandboxed-code."
        )
    return choose_plan(found)


def _plan_bubblewrap(found: IsolationProbe) -> IsolationPlan:
    if shutil.which("bwrap") is None:
        raise UsageError("--code-sandbox bubblewrap needs bwrap, which is not on the path; install bubblewrap.")
    if found.seccomp:
        raise UsageError(f"--code-sandbox bubblewrap needs seccomp, which is missing ({found.seccomp}).")
    return IsolationPlan(namespaces="bubblewrap", landlock=found.landlock, seccomp=True)


def last_line(text: bytes) -> str:
    """The last line a process wrote to standard error."""
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"
