"""The short forms of benchmarks/chaos.py: a run of drifting planes that loses a rank, an engine, itself, and a node."""

from importlib.util import find_spec

import pytest
from benchmarks import chaos
from benchmarks.chaos_cluster import Cluster, networks

REWARD = "tests.launch.small_run:shared_letters"
BLOWS = [("rank", "killed"), ("engine", "killed"), ("driver", "killed")]


def whole(told: chaos.Told, run, blows, steps: int) -> None:
    """It came to its end, all that was to happen did, every ticket has one end, and nothing is left."""
    assert told.code == 0, told.said
    assert [(blow.whom.split()[0], blow.how) for blow in told.blows] == blows
    assert chaos.account(run)["steps"] == steps
    assert not told.left
    assert "the trainer's ranks are started again" in told.said
    assert "miles: the run was ended by SIGKILL" in told.said
    assert "engine" in (run / "logs" / "engines.log").read_text()


@pytest.mark.slow
def test_a_run_that_is_struck_again_and_again_completes_and_every_ticket_has_one_end(tmp_path):
    world, run = chaos.write_world(tmp_path / "world"), tmp_path / "run"
    told = chaos.lived(chaos.flags(world, run, steps=14, reward=REWARD), run, BLOWS, patience=600)
    whole(told, run, BLOWS, 14)


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray")
def test_a_run_on_a_cluster_that_loses_one_of_each_kind_completes_and_every_ticket_has_one_end(tmp_path):
    world, run = chaos.write_world(tmp_path / "world"), tmp_path / "run"
    wires = networks()
    blows = [("node", "killed"), *BLOWS, *([("link", "down")] if wires else [])]
    steps = chaos.steps_for(blows)
    with Cluster(tmp_path / "nodes", namespaces=wires).up() as cluster:
        line = chaos.flags(world, run, steps=steps, reward=REWARD, ray=cluster.address)
        told = chaos.lived(line, run, blows, patience=1500, stage=chaos.OnCluster(cluster))
    whole(told, run, blows, steps)
