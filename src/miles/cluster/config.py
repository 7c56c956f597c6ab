"""Options of the hardware, of fault tolerance and of the Ray runtime."""

from dataclasses import dataclass
from typing import Any, Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Device, nodes and GPUs of training and rollout."""

    device: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device to compute on; auto takes an accelerator if there is one (ROCm counts as cuda)."
    )
    num_threads: int | None = option(None, "CPU threads per operation; torch's default if unset.", unit="threads", ge=1)
    train_env_vars: dict[str, Any] = option(
        factory=dict,
        help="JSON object of environment variables of the trainer's processes; the first of them is this command, "
        "whose engines inherit them.",
    )
    actor_num_nodes: int = option(1, "Nodes for training.", unit="nodes", ge=1)
    actor_num_gpus_per_node: int = option(1, "GPUs for training on each node.", unit="devices", ge=1)
    rollout_num_gpus: int | None = option(
        None, "GPUs for rollout; if unset or with --colocate, those of training.", unit="devices", ge=1
    )
    rollout_num_gpus_per_engine: int = option(
        1, "GPUs per inference engine (tensor parallel size).", unit="devices", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultConfig:
    """Restarts, heartbeats and slow ranks."""

    max_restarts: int = option(
        0,
        "Restarts without a new checkpoint of a run that crashed, was killed or hangs; 0 does not restart it.",
        unit="times",
        ge=0,
    )
    trainer_max_restarts: int = option(
        5,
        "Restarts without a new checkpoint of the trainer's ranks, inside the run, when one of them dies or hangs.",
        unit="times",
        ge=0,
    )
    heartbeat_timeout: float = option(
        60.0,
        "Seconds without a heartbeat after which a rank of the trainer, or with --max-restarts the run itself, is "
        "killed; 0 waits for ever.",
        unit="s",
        ge=0,
    )
    slow_rank_factor: float = option(
        1.5,
        "Report a rank of the trainer or a remote engine as slow that takes this many times the median time per token "
        "of the others, several times in a row; 0 reports none.",
        ge=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayConfig:
    """Runtime: processes of this machine, or a Ray cluster."""

    runtime: Literal["local", "ray"] = option(
        "local", "Start engines and ranks as processes of this machine, or on the nodes of a Ray cluster."
    )
    ray_address: str | None = option(
        None,
        "Ray cluster to join, host:port or auto; if unset, that of RAY_ADDRESS, else a local one is started.",
    )
    ray_placement_timeout: float = option(
        120.0, "How long a run waits for cluster resources that others hold before it fails.", unit="seconds", gt=0
    )
