"""Upstream's dynamic sampling filters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.hooks.compat.types import DynamicFilterOutput, UpstreamSample

__all__ = ["DynamicFilterOutput", "check_reward_nonzero_std"]


def check_reward_nonzero_std(args: Any, samples: Sequence[UpstreamSample], **kwargs: Any) -> DynamicFilterOutput:
    """Keep a group whose rewards differ."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    if len(set(rewards)) > 1:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1):g}")
