"""A run on nodes that share nothing but a wire: each worker in a network of its own, as on several machines."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from benchmarks.chaos_ray_cluster import Cluster, networks
from tests.launch.small_run import ROOT, flags, miles, write_inputs
from tests.launch.test_ray_runs import same_parts

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
    pytest.mark.skipif(not networks(), reason="this machine, or this user, makes no networks"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("nodes"), namespaces=True, worker_cpus=1).up() as made:
        yield made


def test_ranks_and_engines_on_other_hosts_make_the_run_of_one_machine(cluster, tmp_path):
    """The cluster is found by RAY_ADDRESS, as in a job; weights go by broadcast."""
    inputs, far, near = write_inputs(tmp_path / "inputs"), tmp_path / "far", tmp_path / "near"
    ranks = ("--actor-num-nodes", "2", "--rollout-num-gpus", "1", "--update-weight-transport", "distributed")
    line = flags(inputs, far, "--parity", "exact", "--runtime", "ray", "--rollout-backend", "served", *ranks, steps=3)
    words = (sys.executable, "-m", "miles.launch.main", "train", *line)
    around = {**os.environ, **cluster.around, "RAY_ADDRESS": cluster.address, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
    done = subprocess.run(words, env=around, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = miles("train", *flags(inputs, near, "--parity", "exact", "--actor-num-gpus-per-node", "2", steps=3))
    assert done.returncode == 0, done.stderr
    same_parts(far, near)
    words = (far / "logs" / "engine-0.log").read_text().splitlines()[0].split()
    assert words[words.index("--host") + 1] in {worker.address for worker in cluster.workers}


def test_a_cluster_that_asks_for_a_token_says_so_to_whoever_has_none(cluster, tmp_path):
    inputs, run = write_inputs(tmp_path / "inputs"), tmp_path / "run"
    more = ("--runtime", "ray", "--ray-address", cluster.address, "--rollout-backend", "served")
    words = (sys.executable, "-m", "miles.launch.main", "train", *flags(inputs, run, *more, steps=3))
    around = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(words, env=around, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "it asks for a token: set RAY_AUTH_MODE=token" in done.stderr
