"""Upstream's generation functions, over the run's engine and reward."""

from miles.hooks.compat.engine import GenerateState
from miles.hooks.compat.generation import (
    abort,
    async_rm,
    batched_async_rm,
    eval_rollout,
    eval_rollout_single_dataset,
    generate,
    generate_and_rm,
    generate_and_rm_group,
    generate_rollout,
    generate_rollout_async,
)

__all__ = [
    "GenerateState",
    "abort",
    "async_rm",
    "batched_async_rm",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
]
