"""Upstream's math grader, over ours."""

from __future__ import annotations

from miles.rollout.reward.math import extract_sides, is_equal, parse_label
from miles.rollout.reward.text import extract_boxed


def extract_answer(passage: str) -> str | None:
    """The content of the last box."""
    return extract_boxed(passage)


extract_boxed_answer = extract_answer


def grade_answer_verl(solution_str: str, ground_truth: str | float) -> bool:
    """Whether the answer of a response equals the label."""
    sides = extract_sides(solution_str, str(ground_truth))
    return sides is not None and is_equal(*sides)


def grade_answer_mathd(given_answer: str | None, ground_truth: str) -> bool:
    """Whether two answers are equal."""
    return given_answer is not None and is_equal(given_answer, parse_label(ground_truth))


grade_answer_sympy = grade_answer_mathd
