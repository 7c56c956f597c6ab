"""Upstream's token F1, over ours."""

from __future__ import annotations

from miles.rollout.reward.text import measure_token_f1


def f1_score(prediction: str, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of a response's words against the label's."""
    return measure_token_f1(prediction, ground_truth)
