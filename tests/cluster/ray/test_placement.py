"""Placement of a run on nodes: one node per engine, and errors with the numbers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.cluster.ray.placement import ClusterNode, ResourceRequest, plan_placement, sort_nodes
from miles.core.errors import UsageError


def need(nodes=1, per_node=1, engines=0, per_engine=1, shared=False) -> ResourceRequest:
    return ResourceRequest(
        kind="GPU", nodes=nodes, per_node=per_node, engines=engines, per_engine=per_engine, shared=shared
    )


def cluster(*devices: int) -> list[ClusterNode]:
    return [ClusterNode(id=f"n{i}", address=f"10.0.0.{i}", devices=count) for i, count in enumerate(devices)]


def test_nodes_stand_by_rack_and_host_and_then_by_the_number_of_their_address():
    labels = {"a": {"rack": "2"}, "b": {"rack": "1", "host": "y"}, "c": {"rack": "1", "host": "x"}}
    far = [ClusterNode(id=id, address="10.0.0.1", devices=1, labels=its) for id, its in labels.items()]
    near = [ClusterNode(id="d", address="10.0.0.10", devices=1), ClusterNode(id="e", address="10.0.0.9", devices=1)]
    named = ClusterNode(id="f", address="head", devices=1)
    assert [node.id for node in sort_nodes([*far, named, *near])] == ["e", "d", "f", "c", "b", "a"]


def test_the_driver_has_the_first_ranks_and_engines_fill_what_is_left():
    found = plan_placement(need(nodes=2, per_node=2, engines=3, per_engine=2), cluster(4, 4, 2), driver="n1")
    assert found.trainer == ("n1", "n0")
    assert found.engines == ("n0", "n1", "n2")


def test_trainer_nodes_are_chosen_so_that_whole_engines_are_left():
    found = plan_placement(need(nodes=2, per_node=1, engines=2, per_engine=2), cluster(1, 4, 1), driver="n0")
    assert found.trainer == ("n0", "n2") and found.engines == ("n1", "n1")


def test_shared_devices_are_dealt_out_in_fractions():
    shared = need(nodes=2, per_node=4, engines=4, per_engine=2, shared=True)
    assert plan_placement(shared, cluster(4, 4), driver="n0").engines == ()
    assert shared.share == 0.5 and shared.total == 8
    assert [shared.engine_bundle(i) for i in range(4)] == [(0, 0), (0, 2), (1, 0), (1, 2)]
    with pytest.raises(UsageError, match="--rollout-num-gpus-per-engine 3 does not divide --actor-num-gpus-per-node 4"):
        need(per_node=4, engines=1, per_engine=3, shared=True)


def test_a_cluster_without_room_is_refused_with_what_it_has_and_what_is_needed():
    with pytest.raises(UsageError) as refused:
        plan_placement(need(nodes=1, per_node=2, engines=3, per_engine=2), cluster(4, 3), driver="n0")
    assert str(refused.value) == (
        "the Ray cluster is too small for this run: it needs 1 node with 2 GPU for the trainer, this one among them, "
        "and 3 engines of 2 GPU on one node each (8 GPU in total), but of its 2 nodes 10.0.0.0 (this one) has 4, "
        "10.0.0.1 has 3 (7 GPU in total); ask for less with --actor-num-gpus-per-node, --actor-num-nodes or "
        "--rollout-num-gpus, or add nodes"
    )


def test_workers_are_spread_over_cpus_that_are_left_and_refused_with_the_numbers():
    line = [ClusterNode(id=f"n{i}", address=f"10.0.0.{i}", devices=2, cpus=cpus) for i, cpus in enumerate((1, 4, 3))]
    few = ResourceRequest(kind="GPU", nodes=1, per_node=2, engines=2, per_engine=2, shared=False, workers=5)
    assert plan_placement(few, line, driver="n0").workers == ("n0", "n1", "n2", "n1", "n2")
    assert few.describe()[-2:] == [
        "rewards: 5 workers of 1 CPU each, spread over the nodes",
        "total: 6 GPU and 5 CPU of the cluster",
    ]
    on_cpus = ResourceRequest(kind="CPU", nodes=1, per_node=2, engines=1, per_engine=1, shared=False, workers=3)
    assert plan_placement(on_cpus, line, driver="n0").workers == ("n1", "n2", "n2") and on_cpus.cpus == 6
    with pytest.raises(UsageError) as refused:
        plan_placement(replace(on_cpus, workers=4), line, "n0")
    assert str(refused.value) == (
        "the Ray cluster is too small for this run: --reward-num-workers needs 4 more CPU, but of its 3 nodes 10.0.0.0 "
        "(this one) has 0, 10.0.0.1 has 1, 10.0.0.2 has 2 free (3 CPU in total); ask for fewer workers, or add nodes"
    )


@given(
    devices=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    nodes=st.integers(1, 3),
    per_node=st.integers(1, 4),
    engines=st.integers(0, 6),
    per_engine=st.integers(1, 4),
)
def test_no_node_is_given_more_than_it_has(devices, nodes, per_node, engines, per_engine):
    wanted, line = need(nodes, per_node, engines, per_engine), cluster(*devices)
    try:
        found = plan_placement(wanted, line, driver="n0")
    except UsageError:
        return
    assert len(set(found.trainer)) == nodes and found.trainer[0] == "n0" and len(found.engines) == engines
    for node in line:
        used = per_node * found.trainer.count(node.id) + per_engine * found.engines.count(node.id)
        assert used <= node.devices
