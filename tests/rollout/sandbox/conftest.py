"""Which walls this machine has, tried once; tests that need a sandbox are skipped where there can be none."""

import sys

import pytest

from miles.rollout.sandbox import layers
from miles.rollout.sandbox.layers import Found
from miles.rollout.sandbox.order import Plan


@pytest.fixture(scope="session")
def found() -> Found:
    if sys.platform != "linux":
        pytest.skip("the sandbox is for Linux")
    return layers.find()


@pytest.fixture(scope="session")
def plan(found: Found) -> Plan:
    if problem := layers.missing(found):
        pytest.skip(problem)
    return layers.choose(found)
