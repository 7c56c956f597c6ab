"""Workers on a Ray cluster behave like local ones, and move when their node is lost."""

import asyncio
import os
import signal
from functools import partial
from importlib.util import find_spec

import pytest
from tests.cluster.workers.handlers import make, workers_of_ray
from tests.cluster.workers.test_pool import begun, until, who
from tests.launch.test_ray_runs import WATCH

from miles.cluster.workers import pool
from miles.cluster.workers.local import build_worker_spec
from miles.cluster.workers.pool import WorkerPool

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: make test-ray"),
]

SMALL = {"object_store_memory": 80 << 20}


@pytest.fixture(scope="module")
def cluster():
    """A head for the run, and a node for each worker, which has room for the other's too."""
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        made.add_node(num_cpus=1, **SMALL, include_dashboard=False, _system_config=WATCH)
        for _ in range(2):
            made.add_node(num_cpus=2, **SMALL)
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def held(cluster):
    from miles.cluster.ray.placement import ResourceRequest
    from miles.cluster.ray.placement_group import ClusterReservation

    need = ResourceRequest(kind="CPU", nodes=1, per_node=1, engines=0, per_engine=1, shared=False, workers=2)
    made = ClusterReservation(need, address=cluster.address, seconds=60)
    yield made
    made.close()


def crew_on(held, folder, said) -> WorkerPool:
    from miles.cluster.ray.workers import RayWorker

    specs = [build_worker_spec(f"worker {i}", partial(make, folder), {}) for i in range(2)]
    return WorkerPool(
        [RayWorker(life, i, held, seconds=60.0) for i, life in enumerate(specs)], max_concurrency=4, log=said.append
    )


def asks(held, folder, strike, said):
    """Eight questions that are all under way when something is struck; their answers."""

    async def run():
        worker_pool = crew_on(held, folder, said)
        try:
            asked = [asyncio.create_task(worker_pool.call(f"until:{i}".encode())) for i in range(8)]
            await until(lambda: len(begun(folder)) == 8)
            await strike()
            (folder / "go").touch()
            return await asyncio.gather(*asked)
        finally:
            await worker_pool.close()

    answers = asyncio.run(run())
    assert [answer.split()[0] for answer in answers] == [f"until:{i}".encode() for i in range(8)]
    return answers


def test_workers_are_spread_and_one_whose_actor_is_killed_is_replaced(held, tmp_path):
    from miles.cluster.ray.placement_group import find_group_node

    said, killed = [], []
    nodes = [find_group_node(held.worker_bundles(i).group) for i in range(2)]
    assert len(set(nodes)) == 2 and held.driver not in nodes

    async def strike():
        worker, actor = next(iter(workers_of_ray().items()))
        os.kill(actor, signal.SIGKILL)
        killed.append(worker)
        await until(lambda: len(begun(tmp_path)) == 12)

    answers = asks(held, tmp_path, strike, said)
    assert killed[0] not in map(who, answers)
    assert len(said) == 1 and "was lost with its actor" in said[0]
    assert not set(workers_of_ray()) & set(killed)


def test_a_worker_that_cannot_let_go_is_replaced_on_its_node(held, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "_CANCEL_SECONDS", 0.5)
    said = []

    async def run():
        worker_pool = crew_on(held, tmp_path, said)
        try:
            asked = asyncio.create_task(worker_pool.call(b"spin:0"))
            await until(lambda: begun(tmp_path) == ["spin:0"])
            asked.cancel()
            await until(lambda: said and len(worker_pool._workers) == 2)
            return await worker_pool.call(b"well:1")
        finally:
            await worker_pool.close()

    assert asyncio.run(run()).startswith(b"well:1 by ")
    assert "did not stop a cancelled request" in said[0]


def test_workers_of_a_node_that_is_lost_go_on_at_another(cluster, held, tmp_path):
    from miles.cluster.ray.placement_group import find_group_node

    said, gone = [], find_group_node(held.worker_bundles(1).group)

    async def strike():
        await asyncio.to_thread(cluster.remove_node, next(n for n in cluster.list_all_nodes() if n.node_id == gone))
        await until(lambda: len(begun(tmp_path)) >= 12)

    asks(held, tmp_path, strike, said)
    assert find_group_node(held.worker_bundles(1).group) not in (gone, held.driver)
