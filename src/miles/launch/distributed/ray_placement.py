"""The part of a Ray cluster that this process's run has, from before anything starts until it has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from miles.launch.config import Config
from miles.launch.plan.topology import build_resource_request, restore_split, uses_ray

if TYPE_CHECKING:
    from miles.cluster.ray.placement_group import ClusterReservation

_VISIBLE = "CUDA_VISIBLE_DEVICES"
# A process is connected to one cluster, which Ray holds for all of it.
_held: list[ClusterReservation] = []


def get_reservation() -> ClusterReservation | None:
    """What this run has of a cluster; None where it runs on this machine alone."""
    return _held[-1] if _held else None


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

    reserved = ClusterReservation(
        build_resource_request(restore_split(config, run_dir)),
        address=config.ray.ray_address,
        seconds=config.ray.ray_placement_timeout,
        returning=(run_dir / "config.toml").exists(),
    )
    known = os.environ.get(_VISIBLE)
    try:
        if reserved.request.kind == "GPU":  # this process is the first rank, and computes on the device it was given
            os.environ[_VISIBLE] = read_device_ids(reserved.rank_bundles(0))[0]
        _held.append(reserved)
        yield
    finally:
        if reserved in _held:
            _held.remove(reserved)
        if reserved.request.kind == "GPU":
            os.environ.pop(_VISIBLE, None)
            if known is not None:
                os.environ[_VISIBLE] = known
        reserved.close()
