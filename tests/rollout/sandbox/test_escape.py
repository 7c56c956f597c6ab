"""No attempt to get out of the sandbox gets anywhere, whichever walls it is made of, whoever runs it."""

import asyncio
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rollout.sandbox import escape_programs

from miles.rollout.sandbox import seccomp
from miles.rollout.sandbox.isolation import IsolationProbe
from miles.rollout.sandbox.protocol import IsolationPlan
from miles.rollout.sandbox.run import Sandbox

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOMEONE = 54321  # a user that exists nowhere


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with escape_programs.World(tmp_path_factory.mktemp("escape") / "world") as world:
        yield world


@pytest.mark.parametrize("name", escape_programs.ATTEMPTS)
def test_a_program_gets_nowhere_that(name, plan, world):
    assert asyncio.run(escape_programs.tried(Sandbox(plan), name, world)) is None
    assert world.damage() == []


def weaker_walls(found: IsolationProbe) -> dict[str, IsolationPlan]:
    """Other combinations above the minimum that this machine can show, the oldest Landlock included."""
    plans = {}
    if not found.user:
        plans["a user namespace without Landlock"] = IsolationPlan(namespaces="user", seccomp=True)
    if not found.root:
        plans["root's namespaces"] = IsolationPlan(namespaces="root", landlock=found.landlock, seccomp=True)
    for abi in {min(1, found.landlock), found.landlock} - {0}:
        plans[f"Landlock {abi} alone"] = IsolationPlan(landlock=abi, seccomp=True)
    if found.landlock and not found.apart:
        plans["Landlock and another user"] = IsolationPlan(landlock=found.landlock, seccomp=True, apart=True)
    return plans


def test_the_attempts_would_succeed_without_walls(found, tmp_path):
    harmless = (
        "connects to a server on this machine",
        "talks to local sockets",
        "reads the home folder and a secret",
        "reads other processes",
        "signals processes outside",
    )
    for number, name in enumerate(harmless):
        with escape_programs.World(tmp_path / str(number)) as world:
            assert "ESCAPED" in (asyncio.run(escape_programs.tried(Sandbox(IsolationPlan()), name, world)) or "")


@pytest.mark.slow
def test_fewer_walls_hold_too(found, plan, tmp_path):
    for number, (name, weaker) in enumerate(weaker_walls(found).items()):
        assert asyncio.run(escape_programs.all_tried(weaker, tmp_path / str(number))) == [], name


PROBE_RETURNS = (335, 336)
"""uretprobe and uprobe of x86-64, which kernels answer before any filter: SIGILL to a program that is not probed."""


def listed_numbers(plan: IsolationPlan) -> list[int]:
    """The syscalls a plan allows, some of them with certain arguments only; all others must not exist."""
    listed = seccomp.ALLOWED + seccomp.CHECKED + (seccomp.NAMESPACED if plan.namespaces else "")
    return [*seccomp.syscall_numbers(listed, os.uname().machine).values(), *PROBE_RETURNS]


def check_sweep(stdout: str) -> None:
    found = {int(number): error for number, error in json.loads(stdout).items()}
    assert len(found) > 1800 and set(found.values()) == {errno.ENOSYS}


def test_every_syscall_number_outside_the_tables_is_unknown(found, plan):
    for walls in (plan, *weaker_walls(found).values()):
        program = escape_programs.SWEEP.replace("SKIPPED", str(listed_numbers(walls)))
        outcome = asyncio.run(Sandbox(walls).run(program, limits=escape_programs.LIMITS))
        assert outcome.is_success, outcome
        check_sweep(outcome.stdout.decode())


def test_calls_through_the_32_bit_gate_are_fatal(plan):
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 has such a gate")
    outcome = asyncio.run(Sandbox(plan).run(escape_programs.COMPAT))
    assert outcome.stdout == b"before\n" and outcome.signal in (signal.SIGSYS, signal.SIGSEGV)


def test_a_program_gets_no_segment_of_its_own(plan):
    if os.uname().machine != "x86_64":
        pytest.skip("x86-64 has segments")
    outcome = asyncio.run(Sandbox(plan).run(escape_programs.SEGMENT))
    assert outcome.stdout == b"-1 ENOSYS\n" * 4


def test_an_unprivileged_sweep_finds_nothing_either(found, plan):
    python = next(interpreters(), None)
    if os.geteuid() != 0 or python is None or found.user:
        pytest.skip("needs root, a Python that others can run, and user namespaces")
    for walls in (IsolationPlan(namespaces="user", seccomp=True), IsolationPlan(landlock=found.landlock, seccomp=True)):
        skips = json.dumps(listed_numbers(walls))
        done = as_someone(python, str(HERE / "escape_programs.py"), "run", "SWEEP", json.dumps(walls), skips)
        assert done.returncode == 0, done.stderr
        exit_status, _, _, stdout = json.loads(done.stdout)
        assert exit_status == 0
        check_sweep(stdout)


def interpreters() -> Iterator[str]:
    """Pythons that another user can run with our source."""
    for python in dict.fromkeys((os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3")):
        code = "import sys, miles.rollout.sandbox.run; sys.exit(sys.version_info < (3, 11))"
        try:
            if as_someone(python, "-c", code).returncode == 0:
                yield python
        except OSError:
            continue


def as_someone(*command: str) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    who = {"user": SOMEONE, "group": SOMEONE, "extra_groups": []}
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd="/", **who)


@pytest.mark.parametrize("landlock", [0, 1])
def test_no_signal_ends_the_supervisor(found, plan, landlock):
    """Without Landlock 6 a user namespace's programs may signal the supervisor, which has the same user."""
    python = next(interpreters(), None)
    if os.geteuid() != 0 or python is None or found.user or landlock > found.landlock:
        pytest.skip("needs root, a Python that others can run, and user namespaces")
    walls = IsolationPlan(namespaces="user", landlock=landlock, seccomp=True)
    done = as_someone(python, str(HERE / "escape_programs.py"), "run", "SIGNALS", json.dumps(walls))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, None, None, "7\n"]


@pytest.mark.parametrize(
    "landlock",
    [-1, pytest.param(1, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)],
    ids=["chosen walls", "Landlock 1 alone", "Landlock 7 alone"],
)
def test_it_needs_no_privilege(found, plan, landlock):
    if os.geteuid() != 0:
        pytest.skip("this is the case already")
    python = next(interpreters(), None)
    if python is None or landlock > found.landlock:
        pytest.skip("there is no Python that others can run, or no such Landlock")
    done = as_someone(python, str(HERE / "escape_programs.py"), str(landlock))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["found"] == []
    assert report["plan"][2] and (report["plan"][0] == "user" or report["plan"][1])
