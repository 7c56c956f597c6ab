"""Upstream's DeepScaleR grader, over ours."""

from __future__ import annotations

from miles.rollout.reward.math import extract_sides_after_thinking, is_equal


def get_deepscaler_rule_based_reward(response: str, label: str | float) -> int:
    """1 where the answer after the thinking equals the label, else 0."""
    sides = extract_sides_after_thinking(response, str(label))
    return int(sides is not None and is_equal(*sides))
