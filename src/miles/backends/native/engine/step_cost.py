"""Estimated time of a decode step by its number of rows (roofline): what a row for a drafted token costs.

A step launches its kernels, reads every weight it needs once, and meanwhile computes with them for each row. Few rows
of an MoE model need few experts, so that there each further row reads more weights. The figures are of a class of
devices: only the ratio of two estimates is used, and it must be the same each time a run is repeated. Those of a GPU
are fitted to Qwen3-8B and Qwen3-30B-A3B on an H200 (``benchmarks/bench_speculative.py imposed``).
"""

from __future__ import annotations

from dataclasses import dataclass

from miles.cluster.platform import Platform
from miles.models.accounting.params import (
    active_parameter_count,
    forward_flops_per_token,
    packed_weight_bytes,
    parameter_count,
)
from miles.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """Seconds to launch a layer and to handle a row, bytes and FLOPs per second that steps reach, dense and MoE.

    A step of one row, which has kernels of its own, reaches ``single_row_bandwidth``.
    """

    layer_seconds: float
    row_seconds: float
    bandwidth: float
    single_row_bandwidth: float
    flops: float
    moe_flops: float


# A step of a GPU is a CUDA graph; what it loses is the host's turn between two steps (``TURN_SECONDS``).
GPU = DeviceFigures(
    layer_seconds=8e-6,
    row_seconds=1e-5,
    bandwidth=3.5e12,
    single_row_bandwidth=4.2e12,
    flops=6e14,
    moe_flops=2.5e14,
)
CPU = DeviceFigures(
    layer_seconds=4e-4,
    row_seconds=3e-5,
    bandwidth=1.2e10,
    single_row_bandwidth=1.2e10,
    flops=4e10,
    moe_flops=4e10,
)
GPU_TURN_SECONDS = 8e-4
"""Time between two steps when the next one waits for the output of the last, instead of being queued behind it."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of a step; ``turn_seconds`` more if the next step must wait for its output.

    ``read_seconds`` and ``expert_seconds`` read the weights, of which few rows need few experts; ``compute_seconds``
    and ``row_seconds`` are those of one row. A step of one row alone takes ``single_row_saving`` less.
    """

    fixed_seconds: float
    row_seconds: float
    expert_seconds: float
    expert_share: float
    turn_seconds: float = 0.0
    read_seconds: float = 0.0
    compute_seconds: float = 0.0
    single_row_saving: float = 0.0

    def __call__(self, rows: float) -> float:
        share = 1 - (1 - self.expert_share) ** rows if self.expert_share else 0.0
        read = self.read_seconds + self.expert_seconds * share - (self.single_row_saving if rows <= 1 else 0.0)
        # Reading and arithmetic overlap: about the longer of the two, and smooth where they are alike.
        overlapped = (read**4 + (self.compute_seconds * rows) ** 4) ** 0.25
        return self.fixed_seconds + self.row_seconds * rows + overlapped


def estimate_step_cost(spec: DecoderSpec, platform: Platform, dtype: str) -> StepCost:
    """Return the cost of decode steps of a model with weights of ``dtype``, or packed as its spec says."""
    figures = CPU if platform.kind == "cpu" else GPU
    active = active_parameter_count(spec)
    itemsize = packed_weight_bytes(spec, dtype) / parameter_count(spec)
    share = 0.0 if spec.moe is None else spec.moe.experts_per_token / spec.moe.num_experts
    # Of each expert layer the share is active; the rest of the parameters always are.
    experts = (parameter_count(spec) - active) / (1 - share) if 0 < share < 1 else 0.0
    dense = parameter_count(spec) - experts
    return StepCost(
        fixed_seconds=figures.layer_seconds * len(spec.layers),
        row_seconds=figures.row_seconds,
        expert_seconds=experts * itemsize / figures.bandwidth,
        expert_share=share,
        turn_seconds=0.0 if platform.kind == "cpu" else GPU_TURN_SECONDS,
        read_seconds=dense * itemsize / figures.bandwidth,
        single_row_saving=dense * itemsize * (1 / figures.bandwidth - 1 / figures.single_row_bandwidth),
        compute_seconds=forward_flops_per_token(spec) / (figures.flops if spec.moe is None else figures.moe_flops),
    )
