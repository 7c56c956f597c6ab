"""No attempt to get out of the sandbox gets anywhere, whichever walls it is made of, whoever runs it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.rollout.sandbox import attempts

from miles.rollout.sandbox.layers import Found
from miles.rollout.sandbox.order import Plan
from miles.rollout.sandbox.run import Sandbox

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
SOMEONE = 54321  # a user that exists nowhere


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with attempts.World(tmp_path_factory.mktemp("escape") / "world") as world:
        yield world


@pytest.mark.parametrize("name", attempts.ATTEMPTS)
def test_a_program_gets_nowhere_that(name, plan, world):
    assert asyncio.run(attempts.tried(Sandbox(plan), name, world)) is None
    assert world.damage() == []


def weaker_walls(found: Found) -> dict[str, Plan]:
    """Other combinations above the minimum that this machine can show, the oldest Landlock included."""
    plans = {}
    if not found.user:
        plans["a user namespace without Landlock"] = Plan(namespaces="user", seccomp=True)
    if not found.root:
        plans["root's namespaces"] = Plan(namespaces="root", landlock=found.landlock, seccomp=True)
    for abi in {min(1, found.landlock), found.landlock} - {0}:
        plans[f"Landlock {abi} alone"] = Plan(landlock=abi, seccomp=True)
    if found.landlock and not found.apart:
        plans["Landlock and another user"] = Plan(landlock=found.landlock, seccomp=True, apart=True)
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
        with attempts.World(tmp_path / str(number)) as world:
            assert "ESCAPED" in (asyncio.run(attempts.tried(Sandbox(Plan()), name, world)) or "")


@pytest.mark.slow
def test_fewer_walls_hold_too(found, plan, tmp_path):
    for number, (name, weaker) in enumerate(weaker_walls(found).items()):
        assert asyncio.run(attempts.all_tried(weaker, tmp_path / str(number))) == [], name


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
    done = as_someone(python, str(HERE / "attempts.py"), str(landlock))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["found"] == []
    assert report["plan"][2] and (report["plan"][0] == "user" or report["plan"][1])
