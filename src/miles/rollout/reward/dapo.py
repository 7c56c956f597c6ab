r"""DAPO grader: the last line ``Answer: ...`` against the label; +1 when correct, -1 otherwise."""

from __future__ import annotations

import re

from miles.rollout.reward.math import is_equal, parse_label
from miles.rollout.reward.text import extract_boxed
from miles.rollout.reward.types import Metadata

_TAIL = 300  # characters from the end in which the answer must be
_ANSWER = re.compile(r"\banswer\b\**\s*:\s*\**[ \t]*([^\n]*)", re.IGNORECASE)
_UNITS = re.compile(
    r"(?<=[\d}])\s*(?:square|cubic|sq|cu)?\.?\s*(?:units?|degrees?|dollars?|cents?|percent|hours?|minutes?|seconds?|days?|"
    r"years?|(?:centi|milli|kilo)?met(?:er|re)s?|inch(?:es)?|feet|foot|miles?|points?|ways?|[ckm]?m|k?g|gm|in|ft|mph|"
    r"square|integers?|digits?|pounds?|meals?|edges?|students?|multiples?)\b\.?$",
    re.IGNORECASE,
)


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """``score`` is 1 or -1 and ``acc`` 1 or 0: does the last ``Answer:`` of the reply's end state the label's value?"""
    answer_text = _ANSWER.findall(reply[-_TAIL:])
    return _score(answer_text[-1] if answer_text else "", label)


def grade_boxed(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """The same for the last box near the end of the response."""
    return _score(extract_boxed(reply[-_TAIL:]) or "", label)


def _score(answer_text: str, label: str) -> dict[str, float]:
    expected, answer = _clean(parse_label(label)), _clean(answer_text)
    correct = bool(answer) and is_equal(answer, expected)
    return {"score": 1.0 if correct else -1.0, "acc": float(correct)}


def _clean(answer: str) -> str:
    text = answer.strip().strip("*").strip()
    inside = extract_boxed(text)
    text = text if inside is None else inside
    text = _take_formula(text.strip().rstrip(".").strip()).strip("$").strip()
    parts = text.rpartition("=")
    text = parts[2].strip() if parts[1] and not text.endswith("=") and not re.search(r"[<>!]=", text) else text
    return _UNITS.sub("", _take_formula(text)).strip()


def _take_formula(text: str) -> str:
    r"""The formula between two dollar signs, where there is one; the words around it do not count (``$42$ apples``)."""
    parts = text.replace(r"\$", "").split("$")
    return parts[1].strip() if len(parts) == 3 else text
