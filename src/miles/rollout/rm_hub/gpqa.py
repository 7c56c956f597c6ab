"""Upstream's multiple-choice grader, over ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.rollout.reward.gpqa import grade


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 where a response settles on the correct choice, else 0."""
    return grade(response, str(label), metadata or {})
