"""Knobs of the runtime: processes of this machine, or actors of a Ray cluster."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Who starts the processes of a run, and where."""

    runtime: Literal["local", "ray"] = knob(
        "local", "Who starts engines and ranks: this machine, or a Ray cluster on any of its nodes."
    )
    ray_address: str | None = knob(
        None, "The cluster to join, host:port or auto; without it that of RAY_ADDRESS, else one started here."
    )
    ray_placement_timeout: float = knob(
        120.0, "How long others may hold what a run asks of the cluster before it gives up.", unit="seconds"
    )
