"""Several policies on a Ray cluster: the ranks and engines of each have placement groups of their own."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.launch.small_run import miles
from tests.launch.test_policy_ranks import flags, weights, write_start

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]

TWO = {"actor_num_gpus_per_node": 2}
EXACT = ("--parity", "exact")
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ray_policies")
    write_start(folder)
    return folder


@pytest.fixture(scope="module")
def cluster():
    made = started(tries=3)
    yield made
    made.shutdown()


def started(tries: int):
    """A head and a node of two CPUs each: the second policy's two ranks have one node."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        made.add_node(**NODE, include_dashboard=False, _system_config={"worker_niceness": 0})
        made.add_node(**NODE)
    except Exception:  # a node that was late may still come: it goes with its head
        made.shutdown()
        if tries == 1:
            raise
        return started(tries - 1)
    return made


def on(cluster, *more: str) -> tuple[str, ...]:
    served = ("--rollout-backend", "served", "--rollout-num-engines", "1")
    return (*EXACT, "--runtime", "ray", "--ray-address", cluster.address, *served, *more)


@pytest.fixture(scope="module")
def near(start: Path) -> Path:
    """The run without a cluster."""
    done = miles("train", *flags(start, start / "near", *EXACT, **TWO))
    assert done.returncode == 0, done.stderr
    return start / "near"


def rows(run: Path) -> str:
    return (run / "metrics.jsonl").read_text()


def test_policies_on_a_cluster_learn_as_on_one_machine(start, cluster, near):
    run = start / "far"
    done = miles("train", *flags(start, run, *on(cluster), **TWO))
    assert done.returncode == 0, done.stderr
    assert rows(run) == rows(near)
    names = {path.name for path in (run / "logs").iterdir()}
    assert {"engine-of-speaker-0.log", "engine-of-listener-0.log"} <= names


REDUCER = """
import os, signal
from pathlib import Path
import numpy as np
from torch import distributed as dist

def reduce(counts_N):
    folder = Path({folder!r})
    if (folder / "armed").exists() and dist.is_initialized() and dist.get_rank() == 1:
        calls = len(list(folder.iterdir()))
        (folder / str(calls)).touch()
        if calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return np.full(len(counts_N), 1 / sum(counts_N))
"""


def test_a_rank_of_one_policy_that_is_killed_is_replaced_on_its_node(start, cluster, tmp_path):
    """Rank 1 of the listener dies in its second step, the fourth of the run, before any checkpoint."""
    (calls := tmp_path / "calls").mkdir()
    (tmp_path / "reducer.py").write_text(REDUCER.format(folder=str(calls)))
    reducer = {"custom_pg_loss_reducer_function_path": f"{tmp_path / 'reducer.py'}:reduce"}
    more, listener = (*EXACT, "--save-interval", "5"), {"train_every": 2, **TWO, **reducer}
    calm = miles("train", *flags(start, tmp_path / "calm", *more, steps=6, **listener))
    assert calm.returncode == 0, calm.stderr
    (calls / "armed").touch()
    fallen = miles(
        "train", *flags(start, tmp_path / "fallen", *on(cluster, "--save-interval", "5"), steps=6, **listener)
    )
    assert fallen.returncode == 0, fallen.stderr
    assert (
        "policy listener's ranks are restarted from the initial weights, and step 2 is trained again" in fallen.stdout
    )
    assert len(list(calls.iterdir())) == 6, "armed, three steps, and two that were trained twice"
    assert rows(tmp_path / "fallen") == rows(tmp_path / "calm")
    for inside in ((), ("policies", "listener")):
        expected, found = weights(tmp_path / "calm", 6, *inside), weights(tmp_path / "fallen", 6, *inside)
        assert found.keys() == expected.keys() and all((found[name] == expected[name]).all() for name in found)


def test_a_policy_without_room_is_refused_with_the_numbers(start, cluster):
    more = {"actor_num_gpus_per_node": 3, "rollout_num_engines": 1}
    done = miles("train", *flags(start, start / "large", *on(cluster), **more))
    assert done.returncode == 2
    assert "policy listener, beside the others, needs 1 node with 3 CPU for the trainer" in done.stderr
