"""Upstream's metric functions: statistics, pass rates, prefixes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from miles.rollout.evaluate import estimate_pass_at_k


def compute_statistics(values: Sequence[float]) -> dict[str, float]:
    """Mean, median, maximum and minimum."""
    return {
        "mean": fmean(values),
        "median": float(median(values)),
        "max": float(max(values)),
        "min": float(min(values)),
    }


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """``pass@k`` for k = 1, 2, 4 ... of groups that lie one after the other; a reward of 1 passes."""
    groups = [flat_rewards[at : at + group_size] for at in range(0, len(flat_rewards), group_size)]
    passed = [sum(reward == 1 for reward in group) for group in groups]
    sizes = [2**power for power in range(group_size.bit_length()) if 2**power <= group_size]
    if group_size == 1:
        return {}
    return {f"pass@{k}": fmean(estimate_pass_at_k(k, group_size, count) for count in passed) for k in sizes}


def compute_rollout_step(args: Any, rollout_id: int) -> int:
    """The step under which the metrics of a rollout are logged."""
    return rollout_id


def dict_add_prefix(d: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The same values under names with a prefix."""
    return {f"{prefix}{name}": value for name, value in d.items()}


def has_repetition(text: str, n: int = 50, limit: int = 5) -> bool:
    """Whether the last ``n`` characters of a text occur more than ``limit`` times in it."""
    return len(text) > n * limit and text.count(text[-n:]) > limit
