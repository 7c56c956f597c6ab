"""Whole runs on a Ray cluster of several raylets: the same run, to the bit, also when an actor or a node is lost."""

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.cluster.workers.handlers import workers_of_ray
from tests.launch.small_run import Command, flags, miles, write_inputs
from tests.launch.test_server_runs import accounted, same, server_of

from miles.core.errors import UsageError

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]

EXACT = ("--parity", "exact")
ONE = {"num_cpus": 1, "num_gpus": 2, "object_store_memory": 80 << 20}
# A node that is gone is noticed in a few seconds, also on a machine that is busy, on which no worker stands back.
WATCH = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 3,
    "worker_niceness": 0,
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    return write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="module")
def near(inputs, tmp_path_factory) -> Path:
    """The run without a cluster."""
    run = tmp_path_factory.mktemp("runs") / "near"
    done = miles("train", *flags(inputs, run, *EXACT, steps=3))
    assert done.returncode == 0, done.stderr
    return run


@pytest.fixture(scope="module")
def cluster():
    made = started(tries=3)
    yield made
    made.shutdown()


def started(tries: int):
    """A head and two nodes beside it."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        made.add_node(**ONE, include_dashboard=False, _system_config=WATCH)
        for _ in range(2):
            made.add_node(**ONE)
    except Exception:  # a node that was late may still come: it goes with its head
        made.shutdown()
        if tries == 1:
            raise
        return started(tries - 1)
    return made


def joined(cluster, tries: int):
    """One node more; Ray gives it 30 seconds to start, which a machine with much else to do may not have."""
    try:
        return cluster.add_node(**ONE)
    except Exception:
        if tries == 1:
            raise
        return joined(cluster, tries - 1)


def on(cluster, *more: str) -> tuple[str, ...]:
    return (*EXACT, "--runtime", "ray", "--ray-address", cluster.address, "--rollout-backend", "served", *more)


def same_parts(run: Path, other: Path) -> None:
    """All that was measured, and the last weights and moments, which each rank has written its part of."""
    assert (run / "metrics.jsonl").read_text() == (other / "metrics.jsonl").read_text()
    last = [max((each / "checkpoints").iterdir()) for each in (run, other)]
    parts = [{file.name: file.read_bytes() for file in each.glob("*.safetensors")} for each in last]
    assert parts[0] == parts[1] and len(parts[0]) == 4


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def actor_of(run: Path, number: int) -> int:
    """The process of an engine's actor: the server's guard is its child."""
    return parent(parent(server_of(run, number)))


def test_a_cluster_that_is_too_small_is_refused_with_the_numbers(inputs, cluster, tmp_path):
    done = miles("train", *flags(inputs, tmp_path / "run", *on(cluster, "--rollout-num-gpus", "5"), steps=3))
    assert done.returncode == 2
    assert "needs 1 node with 1 CPU for the trainer" in done.stderr and "5 engines of 1 CPU" in done.stderr
    assert "of its 3 nodes" in done.stderr and "(3 CPU in total)" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("shared", [False, True])
def test_engines_see_the_devices_they_were_given(cluster, shared):
    """Ray only counts these devices, so that there need be none."""
    from miles.cluster.ray.placement import ResourceRequest
    from miles.cluster.ray.placement_group import ClusterReservation, find_group_node, read_device_ids

    need = ResourceRequest(kind="GPU", nodes=1 + shared, per_node=2, engines=2, per_engine=2, shared=shared)
    held = ClusterReservation(need, address=cluster.address, seconds=60)
    try:
        spots = [held.engine_bundles(number) for number in range(2)]
        assert [sorted(read_device_ids(spot)) for spot in spots] == [["0", "1"]] * 2
        assert len({find_group_node(spot.group) for spot in spots}) == 2
        assert (find_group_node(spots[0].group) == held.driver) == shared
        assert {spot.share for spot in spots} == {0.5 if shared else 1.0}
        assert read_device_ids(held.rank_bundles(1)) in (["0"], ["1"])
        with pytest.raises(UsageError, match="others hold them"):
            ClusterReservation(need, address=None, seconds=1)
    finally:
        held.close()


def test_a_run_on_engines_of_other_nodes_one_of_whose_actors_is_killed_is_the_run_without_a_cluster(
    inputs, near, cluster, tmp_path
):
    run = tmp_path / "far"
    going = Command("train", *flags(inputs, run, *on(cluster, "--rollout-num-gpus", "2"), steps=3))
    going.wait_to_hear("step 1/3")
    server = server_of(run, 0)
    os.kill(actor_of(run, 0), signal.SIGKILL)
    done = going.done()
    assert done.returncode == 0, done.stderr
    same(run, near)
    accounted(run)
    assert "engine 0 " in (run / "logs" / "engines.log").read_text()
    assert not Path(f"/proc/{server}").exists()  # it ended with its actor
    words = (run / "logs" / "engine-0.log").read_text().splitlines()[0].split()
    assert words[words.index("--host") + 1] != "127.0.0.1"  # other nodes reach it, and it asks for a key


def test_rewards_that_a_worker_on_a_node_computes_are_those_of_the_run_also_when_it_is_killed(
    inputs, near, cluster, tmp_path
):
    run, more = tmp_path / "far", ("--rollout-num-gpus", "1", "--reward-num-workers", "1")
    going = Command("train", *flags(inputs, run, *on(cluster, *more), steps=3))
    going.wait_to_hear("step 1/3")
    os.kill(next(iter(workers_of_ray().values())), signal.SIGKILL)
    done = going.done()
    assert done.returncode == 0, done.stderr
    same(run, near)
    accounted(run)
    assert "reward worker 0 was lost with its actor" in (run / "logs" / "rewards.log").read_text()


def test_ranks_on_two_nodes_one_of_which_is_killed_train_as_two_ranks_on_one(inputs, cluster, tmp_path):
    far, near = tmp_path / "far", tmp_path / "near"
    more = on(cluster, "--actor-num-nodes", "2", "--rollout-num-gpus", "1")
    going = Command("train", *flags(inputs, far, *more, steps=3))
    going.wait_to_hear("step 1/3")
    os.kill(rank_of(going.pid), signal.SIGKILL)
    done = going.done()
    assert done.returncode == 0, done.stderr
    done = miles("train", *flags(inputs, near, *EXACT, "--actor-num-gpus-per-node", "2", steps=3))
    assert done.returncode == 0, done.stderr
    same_parts(far, near)


def test_without_an_address_a_cluster_is_started_whose_devices_engines_share(inputs, near, tmp_path):
    run = tmp_path / "own"
    more = ("--runtime", "ray", "--rollout-backend", "served", "--rollout-num-engines", "2")
    done = miles("train", *flags(inputs, run, *EXACT, *more, steps=3))
    assert done.returncode == 0, done.stderr
    same(run, near)


def test_an_engine_whose_node_is_lost_is_started_on_another(inputs, near, cluster, tmp_path):
    run = tmp_path / "moved"
    going = Command("train", *flags(inputs, run, *on(cluster, "--rollout-num-gpus", "1"), steps=3))
    going.wait_to_hear("step 1/3")
    gone = next(node for node in cluster.worker_nodes if owns(node, actor_of(run, 0)))
    cluster.remove_node(gone)
    done = going.done()
    joined(cluster, tries=3)
    assert done.returncode == 0, done.stderr
    same(run, near)
    assert "engine 0 is back" in (run / "logs" / "engines.log").read_text()


def test_a_run_that_goes_on_waits_for_nodes_that_were_lost(cluster, monkeypatch):
    from miles.cluster.ray import placement_group
    from miles.cluster.ray.placement import ResourceRequest

    looks, all_of = [], placement_group.list_nodes

    def back_at_the_fourth_look(kind: str):
        looks.append(kind)
        driver = placement_group.ray.get_runtime_context().get_node_id()
        return [node for node in all_of(kind) if node.id == driver or len(looks) > 3]

    monkeypatch.setattr(placement_group, "list_nodes", back_at_the_fourth_look)
    need = ResourceRequest(kind="CPU", nodes=3, per_node=1, engines=0, per_engine=1, shared=False)
    with pytest.raises(UsageError, match="too small for this run: it needs 3 nodes"):
        placement_group.ClusterReservation(need, address=cluster.address, seconds=300)
    assert len(looks) == 1  # a new node is reported at once
    held = placement_group.ClusterReservation(need, address=cluster.address, seconds=300, returning=True)
    try:
        assert len({placement_group.find_group_node(held.rank_bundles(number).group) for number in range(3)}) == 3
    finally:
        held.close()


def owns(node, pid: int) -> bool:
    """Is this a worker of the node's raylet?"""
    return node.all_processes["raylet"][0].process.pid == parent(pid)


def rank_of(driver: int | None) -> int:
    """The process of a rank on another node: a child of an actor, spawned."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != driver:
            try:
                words = (entry / "cmdline").read_bytes()
                above = Path(f"/proc/{parent(int(entry.name))}/cmdline").read_bytes()
            except OSError:
                continue
            if b"spawn_main" in words and above.startswith(b"ray::_RankActor"):
                return int(entry.name)
    raise AssertionError("no rank runs on another node")
