"""Rules of runs on a Ray cluster, and what such a run asks of it. No torch, no Ray."""

from collections.abc import Iterator
from importlib.util import find_spec

from miles.algo.config import GIVEN
from miles.cluster.ray.placement import Need
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.machine import choose_device
from miles.launch.server_rules import engine_count, is_remote


def on_ray(c: Config) -> bool:
    """Does a Ray cluster start the processes of this run?"""
    return c.ray.runtime == "ray"


def need_of(c: Config) -> Need:
    """What the run asks of the cluster; refuses (UsageError) sizes that no node could have."""
    hosts = is_remote(c) and not c.sglang.rollout_external_engine_addrs and c.algo.loss_type not in GIVEN
    return Need(
        kind="CPU" if choose_device(c.cluster.device).name == "cpu" else "GPU",
        nodes=c.cluster.actor_num_nodes,
        per_node=c.cluster.actor_num_gpus_per_node,
        engines=engine_count(c) if hosts else 0,
        per_engine=c.cluster.rollout_num_gpus_per_engine,
        shared=c.cluster.rollout_num_gpus is None,
        workers=c.rollout.reward_num_workers,
    )


def a_cluster_is_there_to_be_asked(c: Config) -> Iterator[str]:
    if on_ray(c) and find_spec("ray") is None:
        yield "--runtime ray needs the package ray: pip install 'miles-rl[ray]'."
    if not on_ray(c) and c.ray.ray_address is not None:
        yield f"--ray-address {c.ray.ray_address} is for --runtime ray; say that, or leave it out."


def a_cluster_has_engines_that_are_servers(c: Config) -> Iterator[str]:
    if not on_ray(c):
        return
    if not is_remote(c) and c.algo.loss_type not in GIVEN:
        yield "--runtime ray starts engines as servers on its nodes: say --rollout-backend served, or sglang."
    if c.cast.policies:
        yield "--runtime ray places the engines of one policy, and --policies names several; leave one of them out."
    if c.sglang.rollout_backend == "sglang" and c.sglang.update_weight_transport == "tensor":
        yield (
            "--update-weight-transport tensor hands SGLang memory of its own machine, and --runtime ray may put it on "
            "another; use distributed, or disk where all nodes see the run's folder."
        )


def an_engine_is_on_one_node(c: Config) -> Iterator[str]:
    if on_ray(c):
        try:
            need_of(c)
        except UsageError as error:
            yield f"{error.problems[0]}."


RAY = (
    a_cluster_is_there_to_be_asked,
    a_cluster_has_engines_that_are_servers,
    an_engine_is_on_one_node,
)
