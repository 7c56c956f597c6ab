"""Options of remote engines: backend, number, addresses, health checks and weight transport."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option, passthrough


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """Rollout backend, servers to start or reach, health checks and weight transport."""

    rollout_backend: Literal["native", "sglang", "served"] = option(
        "native",
        "Inference engine: native in this process, stock sglang servers, or native engines in servers (miles serve).",
    )
    rollout_num_engines: int | None = option(
        None,
        "Number of servers to start; if unset, --rollout-num-gpus divided by --rollout-num-gpus-per-engine.",
        unit="engines",
        ge=1,
    )
    rollout_external_engine_addrs: tuple[str, ...] = option(
        (), "URLs of running servers, for example http://host:30000; none is started then."
    )
    rollout_engine_token_env: str | None = option(
        None, "Environment variable with the API key of running servers, also of those that join later."
    )
    sglang_python: str | None = option(
        None, "Python interpreter with sglang installed, such as .venv-sglang/bin/python; this one if unset."
    )
    update_weight_transport: Literal["auto", "ipc", "tensor", "delta", "distributed", "disk"] = option(
        "auto",
        "Weight transport: CUDA IPC, HTTP requests, differences only, a process group (NCCL or Gloo), or files; auto "
        "is ipc for miles serve on the trainer's device, else tensor.",
    )
    update_weight_buffer_size: int = option(512 << 20, "Bucket size of weight updates.", unit="bytes", ge=1)
    update_weight_timeout: float = option(600.0, "Timeout of one weight-update request.", unit="seconds", gt=0)
    check_weight_update_equal: bool | None = option(
        None,
        "Overwrite the weights of every engine with noise before the first weight update, and require that each tensor "
        "equals the trainer's afterwards; if unset, only for miles serve.",
    )
    rollout_start_timeout: float = option(600.0, "Timeout for starting a server.", unit="seconds", gt=0)
    rollout_health_check_interval: float = option(
        10.0, "Time between two health checks of a server.", unit="seconds", gt=0
    )
    rollout_health_check_timeout: float = option(30.0, "Timeout of a health check.", unit="seconds", gt=0)
    rollout_health_check_first_wait: float = option(
        0.0, "Delay of the first health check after a server has started.", unit="seconds", ge=0
    )
    rollout_max_restarts: int = option(5, "Restarts of a server before it is given up.", ge=0)
    sglang_flags: tuple[str, ...] = passthrough(
        "sglang", "Options of SGLang's server, such as --sglang-mem-fraction-static 0.8."
    )
