"""Knobs of the machine: which device, how many of them, how many threads."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Where the planes live."""

    device: Literal["auto", "cpu", "cuda"] = knob(
        "auto", "What to compute on; auto takes an accelerator when there is one (ROCm counts as cuda)."
    )
    num_threads: int | None = knob(None, "CPU threads for one operation; without it torch decides.", unit="threads")
    actor_num_nodes: int = knob(1, "Machines of the training plane.", unit="nodes")
    actor_num_gpus_per_node: int = knob(1, "Devices of the training plane on each machine.", unit="devices")
    rollout_num_gpus: int | None = knob(
        None, "Devices of the rollout plane; without it the training plane's are shared.", unit="devices"
    )
    rollout_num_gpus_per_engine: int = knob(1, "Devices one engine spans.", unit="devices")
