"""Checkpoint that stock SGLang servers load: the run's own, or a copy of it with the engine's FP8 weights.

SGLang builds quantized layers from the ``quantization_config`` of the folder that it loads, and takes weight updates in
that format from then on. The copy is written once, one matrix at a time, and is used again when the run is resumed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch

from miles.backends.remote.sglang_fp8 import find_device_problem, requantizes_blocks
from miles.core.errors import UsageError
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.config import Config
from miles.launch.plan.plan import Plan
from miles.models.checkpoint.convert import Conversion, convert_checkpoint, plan_conversion

__all__ = ["needs_triton_fp8", "prepare_server_checkpoint"]

FOLDER = "rollout_checkpoints"


def prepare_server_checkpoint(
    config: Config, plan: Plan, policy: PolicyCheckpoint, report: Callable[[str], None] = lambda text: None
) -> Path:
    """The folder that servers load. One that has the engine's format already is used in place."""
    quantization = policy.rollout_quantization
    if config.sglang.rollout_backend != "sglang" or quantization is None:
        return policy.folder
    if policy.rollout_dtype == torch.float32:
        raise UsageError(
            f"SGLang multiplies {quantization.format.name} weights with bfloat16 inputs, but the engine's dtype is "
            "float32; add --rollout-dtype bfloat16."
        )
    problem = find_device_problem(policy.platform.kind, _get_capability(policy))
    if problem is not None:
        raise UsageError(f"{problem}; use --rollout-backend served.")
    conversion = plan_conversion(
        policy.folder, format=quantization.format, dtype=policy.rollout_dtype, quantization=quantization
    )
    if _has_format(conversion):
        return policy.folder
    target = plan.run_dir / FOLDER / f"{policy.folder.name}-{_fingerprint(conversion)}"
    if not target.exists():
        size = conversion.total_bytes / 2**30
        report(f"Writing {policy.folder} in {quantization.format.name} for SGLang to {target} ({size:,.1f} GiB)")
        convert_checkpoint(conversion, target)
    return target


def needs_triton_fp8(policy: PolicyCheckpoint) -> bool:
    """Whether SGLang must be told to take its FP8 kernels in Triton, since its default ones change the weights."""
    return policy.rollout_quantization is not None and requantizes_blocks(_get_capability(policy))


def _get_capability(policy: PolicyCheckpoint) -> tuple[int, int] | None:
    """The compute capability of the GPU; None on a CPU."""
    return None if policy.platform.kind == "cpu" else torch.cuda.get_device_capability(policy.platform.device)


def _has_format(conversion: Conversion) -> bool:
    """Whether the source has every tensor that would be written, with FP8 values in the same ones."""
    stored = conversion.stored
    headers = [header for unit in conversion.plan.units for header in unit.headers()]
    return bool(conversion.formats) and all(
        header.name in stored
        and stored[header.name].shape == header.shape
        and (stored[header.name].dtype == "F8_E4M3") == (header.dtype == "F8_E4M3")
        for header in headers
    )


def _fingerprint(conversion: Conversion) -> str:
    """Of the source and of what is written: a copy of another model, or with other layers quantized, is another."""
    written = json.dumps([str(conversion.source.resolve()), conversion.plan.config], sort_keys=True)
    return hashlib.sha256(written.encode()).hexdigest()[:12]
