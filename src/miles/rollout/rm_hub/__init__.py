"""Upstream's rewards: the run's own, and graders by upstream's names."""

from miles.hooks.compat.generation import async_rm, batched_async_rm
from miles.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from miles.rollout.rm_hub.f1 import f1_score
from miles.rollout.rm_hub.gpqa import compute_gpqa_reward
from miles.rollout.rm_hub.math_dapo_utils import compute_score as compute_score_dapo
from miles.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from miles.rollout.rm_hub.math_utils import grade_answer_verl

__all__ = [
    "async_rm",
    "batched_async_rm",
    "compute_gpqa_reward",
    "compute_score_dapo",
    "extract_boxed_answer",
    "f1_score",
    "get_deepscaler_rule_based_reward",
    "grade_answer_verl",
]
