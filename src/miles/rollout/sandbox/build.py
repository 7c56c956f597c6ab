"""Build the sandbox and its limits from the options, for everything that runs model-written programs."""

from __future__ import annotations

from miles.rollout.config import RolloutConfig
from miles.rollout.sandbox.container import create_container_sandbox
from miles.rollout.sandbox.protocol import MIB, SandboxLimits
from miles.rollout.sandbox.run import CodeSandbox, create_sandbox


def build_sandbox(config: RolloutConfig) -> CodeSandbox:
    """Probe and create the sandbox; UsageError when it is unavailable."""
    backend, concurrency = config.code_sandbox, config.code_concurrency
    if backend == "docker" or backend == "podman":
        return create_container_sandbox(backend, image=config.code_sandbox_image, concurrency=concurrency)
    return create_sandbox(unsandboxed=config.allow_unsandboxed_code, concurrency=concurrency, backend=backend)


def sandbox_limits_from_config(config: RolloutConfig) -> SandboxLimits:
    """Sandbox limits from the options."""
    return SandboxLimits(
        wall=config.code_wall_seconds,
        cpu=config.code_cpu_seconds,
        memory=config.code_memory_mib * MIB,
        processes=config.code_processes,
        file=config.code_scratch_mib * MIB,
        scratch=config.code_scratch_mib * MIB,
        output=config.code_output_kib << 10,
    )
