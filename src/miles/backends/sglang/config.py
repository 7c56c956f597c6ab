"""Knobs of engines behind HTTP: which, how many, where, how they are watched, and how weights get there."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob, mail


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangConfig:
    """Engines that are processes of their own."""

    rollout_backend: Literal["native", "sglang", "served"] = knob(
        "native", "What samples: native in this process, stock sglang servers, or native ones served by processes."
    )
    rollout_num_engines: int | None = knob(
        None,
        "How many servers to start; without it --rollout-num-gpus over --rollout-num-gpus-per-engine.",
        unit="engines",
    )
    rollout_external_engine_addrs: tuple[str, ...] = knob(
        (), "Servers that run already, as in http://host:30000; none is started then."
    )
    rollout_engine_token_env: str | None = knob(
        None, "The environment variable that holds the key of servers which run already, also of those that join later."
    )
    sglang_python: str | None = knob(
        None, "The interpreter that has sglang installed, such as .venv-sglang/bin/python; without it this one."
    )
    update_weight_transport: Literal["auto", "ipc", "tensor", "delta", "distributed", "disk"] = knob(
        "auto",
        "How new weights get to servers: from the trainer's memory, in requests, as changes, over a group of ranks, or "
        "through a folder; auto is ipc where servers of ours share its device, else tensor.",
    )
    update_weight_buffer_size: int = knob(512 << 20, "The most bytes of weights sent at a time.", unit="bytes")
    update_weight_timeout: float = knob(600.0, "How long one request that changes weights may take.", unit="seconds")
    rollout_start_timeout: float = knob(600.0, "How long a server may take to start.", unit="seconds")
    rollout_health_check_interval: float = knob(
        10.0, "How often each server is asked after its health.", unit="seconds"
    )
    rollout_health_check_timeout: float = knob(30.0, "How long such an answer may take.", unit="seconds")
    rollout_health_check_first_wait: float = knob(
        0.0, "How long a server that just started is left alone.", unit="seconds"
    )
    rollout_max_restarts: int = knob(5, "How often a server may be started again before it is given up.")
    sglang_flags: tuple[str, ...] = mail(
        "sglang", "Flags of SGLang's own server, such as --sglang-mem-fraction-static 0.8."
    )
