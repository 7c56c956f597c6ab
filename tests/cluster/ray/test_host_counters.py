"""The GPU counters of every node with a rank or an engine are read, or why there are none."""

from importlib.util import find_spec

import pytest

from miles.cluster.gpu_counters import HostGpuCounters
from miles.cluster.platform import GpuCounters

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]

SMALL = {"object_store_memory": 80 << 20}
OTHER = "127.0.0.2"


@pytest.fixture(scope="module")
def held():
    """A rank on the driver's node, and one on a node with another address."""
    from ray.cluster_utils import Cluster

    from miles.cluster.ray.placement import ResourceRequest
    from miles.cluster.ray.placement_group import ClusterReservation

    made = Cluster()
    try:
        made.add_node(num_cpus=1, **SMALL, include_dashboard=False)
        made.add_node(num_cpus=1, **SMALL, node_ip_address=OTHER)
        need = ResourceRequest(kind="CPU", nodes=2, per_node=1, engines=0, per_engine=1, shared=False)
        reservation = ClusterReservation(need, address=made.address, seconds=120)
        yield reservation
        reservation.close()
    finally:
        made.shutdown()


def test_the_other_nodes_answer_by_address(held):
    from miles.cluster.ray.host_counters import RayHostCounters

    local, notes = GpuCounters(), []
    counters = HostGpuCounters(
        lambda: local.read() if local.available else local.why, RayHostCounters(held), notes.append
    )
    try:
        for _ in range(100):  # until its actor has started
            found = counters.read()
            seen = {name.split()[0] for name in found} | {OTHER for note in notes if OTHER in note}
            if OTHER in seen:
                break
        assert OTHER in seen
        if not local.available:  # then the other node, which is this machine too, lacks it as well, and says so once
            counters.read()
            assert notes == [f"GPU counters are not recorded on {host}: {local.why}" for host in ("this host", OTHER)]
    finally:
        counters.close()
