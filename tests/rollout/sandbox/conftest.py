"""Which walls this machine has, tried once; tests that need a sandbox are skipped where there can be none."""

import sys

import pytest

from miles.rollout.sandbox import isolation
from miles.rollout.sandbox.isolation import IsolationProbe
from miles.rollout.sandbox.protocol import IsolationPlan


@pytest.fixture(scope="session")
def found() -> IsolationProbe:
    if sys.platform != "linux":
        pytest.skip("the sandbox is for Linux")
    return isolation.probe_isolation()


@pytest.fixture(scope="session")
def plan(found: IsolationProbe) -> IsolationPlan:
    if problem := isolation.find_missing(found):
        pytest.skip(problem)
    return isolation.choose_plan(found)
