"""Upstream's instruction-following grader, over ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.rollout.reward.ifeval.registry import grade


def compute_ifbench_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    """1 where a response follows all instructions of its metadata, else 0."""
    return grade(response, str(label), metadata or {})["score"]
