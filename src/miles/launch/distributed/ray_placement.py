"""The part of a Ray cluster that this process's run has, from before anything starts until it has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from miles.launch.config import Config
from miles.launch.plan.topology import restore_split, uses_ray
from miles.launch.policies.config import get_policies
from miles.launch.policies.placement import build_resource_requests

if TYPE_CHECKING:
    from miles.cluster.ray.placement_group import ClusterReservation

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A process is connected to one cluster, which Ray holds for all of it. By policy, the main one first.
_held: dict[str, ClusterReservation] = {}


def get_reservation(policy: str | None = None) -> ClusterReservation | None:
    """What a policy of this run has of a cluster, by default the main one; None where it runs on this machine alone."""
    return next(iter(_held.values()), None) if policy is None else _held.get(policy)


@contextmanager
def reserve_cluster(config: Config, run_dir: Path) -> Iterator[None]:
    """Have what the run asks of the cluster, if it asks one, with its devices as they were divided last.

    What the cluster has no room for is refused. A run that goes on has had that room before: it waits for nodes that
    were lost.
    """
    if not uses_ray(config):
        yield
        return
    from miles.cluster.ray.placement_group import ClusterReservation, read_device_ids

    config = restore_split(config, run_dir)
    known = os.environ.get(_VISIBLE)
    with ExitStack() as reservations:
        main: ClusterReservation | None = None
        requests = build_resource_requests(config, get_policies(config))
        for name, request in requests.items():
            reserved = ClusterReservation(
                request,
                address=config.ray.ray_address,
                seconds=config.ray.ray_placement_timeout,
                returning=(run_dir / "config.toml").exists(),
                beside=tuple(_held.values()),
                owner=name if main is not None else "",
                cpus=sum(each.cpus for each in requests.values()),
            )
            main = main or reserved
            reservations.callback(_release, name, reserved)
            _held[name] = reserved
        assert main is not None, "there is a main policy"
        try:
            if main.request.kind == "GPU":  # this process is the first rank, and computes on the device it was given
                os.environ[_VISIBLE] = read_device_ids(main.rank_bundles(0))[0]
            yield
        finally:
            if main.request.kind == "GPU":
                os.environ.pop(_VISIBLE, None)
                if known is not None:
                    os.environ[_VISIBLE] = known


def _release(name: str, reserved: ClusterReservation) -> None:
    if _held.get(name) is reserved:
        del _held[name]
    reserved.close()
