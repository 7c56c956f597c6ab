"""The short forms of benchmarks/bench_chaos.py: a run that loses a rank, an engine, itself, and a node."""

from importlib.util import find_spec

import pytest
from benchmarks import bench_chaos
from benchmarks.chaos_ray_cluster import Cluster, networks

REWARD = "tests.launch.small_run:shared_letters"
BLOWS = [("rank", "killed"), ("engine", "killed"), ("driver", "killed")]


def whole(expected: bench_chaos.RunOutcome, run, blows, steps: int) -> None:
    """It came to its end, all that was to happen did, every ticket has one end, and nothing is left."""
    assert expected.code == 0, expected.said
    assert [(blow.whom.split()[0], blow.how) for blow in expected.blows] == blows
    assert bench_chaos.summarize_run(run)["steps"] == steps
    assert not expected.left
    assert "the trainer's ranks are restarted" in expected.said
    assert "miles: the run was killed by SIGKILL" in expected.said
    assert "engine" in (run / "logs" / "engines.log").read_text()


@pytest.mark.slow
def test_a_run_that_is_struck_again_and_again_completes_and_every_ticket_has_one_end(tmp_path):
    inputs, run = bench_chaos.write_inputs(tmp_path / "inputs"), tmp_path / "run"
    reported = bench_chaos.run_with_faults(
        bench_chaos.flags(inputs, run, steps=14, reward=REWARD), run, BLOWS, patience=600
    )
    whole(reported, run, BLOWS, 14)


@pytest.mark.ray
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray")
def test_a_run_on_a_cluster_that_loses_one_of_each_kind_completes_and_every_ticket_has_one_end(tmp_path):
    inputs, run = bench_chaos.write_inputs(tmp_path / "inputs"), tmp_path / "run"
    wires = networks()
    blows = [("node", "killed"), *BLOWS, *([("link", "down")] if wires else [])]
    steps = bench_chaos.steps_for(blows)
    with Cluster(tmp_path / "nodes", namespaces=wires).up() as cluster:
        line = bench_chaos.flags(inputs, run, steps=steps, reward=REWARD, ray=cluster.address)
        reported = bench_chaos.run_with_faults(line, run, blows, patience=1500, stage=bench_chaos.OnCluster(cluster))
    whole(reported, run, blows, steps)
