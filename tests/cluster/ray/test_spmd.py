"""Ranks on a Ray cluster behave like ranks on one machine."""

import os
import signal
from importlib.util import find_spec

import numpy as np
import pytest
from tests.cluster.test_spmd import CODEC, follow

from miles.cluster.spmd import SpmdGroup
from miles.core.errors import TrainerError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]


@pytest.fixture(scope="module")
def held():
    from miles.cluster.ray.placement import ResourceRequest
    from miles.cluster.ray.placement_group import ClusterReservation

    need = ResourceRequest(kind="CPU", nodes=1, per_node=3, engines=0, per_engine=1, shared=False)
    made = ClusterReservation(need, address=None, seconds=120)
    yield made
    made.close()


@pytest.fixture
def team(held):
    from miles.cluster.ray.spmd import RayRankLauncher

    launcher = RayRankLauncher(held)
    made = SpmdGroup(
        "the team",
        [f"place {i}" for i in range(3)],
        follow,
        codec=CODEC,
        exclusive_devices=True,
        timeout=120.0,
        error=TrainerError,
        hint="begin again",
        launcher=launcher,
        rendezvous=launcher.rendezvous,
        heartbeat_timeout=10.0,
    )
    yield made
    made.close()


def test_all_are_told_and_heard_in_their_order(team):
    pids = team.gather_replies()
    assert len({*pids, os.getpid()}) == 3
    numbers = np.arange(300_000, dtype=np.float64)  # too long to be sent at once
    team.broadcast("sum", {"numbers": numbers})
    assert team.gather_replies() == [numbers.sum()] * 2
    team.broadcast("who", "content")
    assert team.gather_replies() == [(1, 3, "place 1", "content"), (2, 3, "place 2", "content")]
    team.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_killed_or_frozen_is_noticed(team, end):
    pids = team.gather_replies()
    team.broadcast("wait", 2)  # whom no word of the other's will wake
    os.kill(pids[1], end)
    with pytest.raises(TrainerError, match=r"rank 2 of 3 ended with SIGKILL; begin again"):
        team.gather_replies()
    assert team.rank_died
