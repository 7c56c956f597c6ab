"""Upstream's DAPO grader, over ours."""

from __future__ import annotations

from typing import Any

from miles.rollout.reward.dapo import grade, grade_boxed
from miles.rollout.reward.text import extract_boxed


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None, **_: Any
) -> dict[str, Any]:
    """``score`` 1 or -1, ``acc`` and ``pred``; with ``strict_box_verify`` the answer is in a box."""
    result = (grade_boxed if strict_box_verify else grade)(solution_str, str(ground_truth), {})
    return {**result, "acc": bool(result["acc"]), "pred": extract_boxed(solution_str) or ""}
