r"""Answers in the form DAPO's prompts ask for: a last line ``Answer: ...``; +1 when right, -1 when not."""

from __future__ import annotations

import re

from miles.rollout.reward.boxed import boxed
from miles.rollout.reward.math import same, truth
from miles.rollout.reward.score import Metadata

_TAIL = 300  # characters from the end in which the answer must be
_ANSWER = re.compile(r"\banswer\b\**\s*:\s*\**[ \t]*([^\n]*)", re.IGNORECASE)
_UNITS = re.compile(
    r"(?<=[\d}])\s*(?:square|cubic|sq|cu)?\.?\s*(?:units?|degrees?|dollars?|cents?|percent|hours?|minutes?|seconds?|days?|"
    r"years?|(?:centi|milli|kilo)?met(?:er|re)s?|inch(?:es)?|feet|foot|miles?|points?|ways?|[ckm]?m|k?g|in|ft|mph)\b\.?$",
    re.IGNORECASE,
)


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """``score`` is 1 or -1 and ``acc`` 1 or 0: does the last ``Answer:`` of the reply's end state the label's value?"""
    stated = _ANSWER.findall(reply[-_TAIL:])
    return _scored(stated[-1] if stated else "", label)


def grade_boxed(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """The same of the last box of the reply's end."""
    return _scored(boxed(reply[-_TAIL:]) or "", label)


def _scored(stated: str, label: str) -> dict[str, float]:
    wanted, answer = _cleaned(truth(label)), _cleaned(stated)
    right = bool(answer) and same(answer, wanted)
    return {"score": 1.0 if right else -1.0, "acc": float(right)}


def _cleaned(answer: str) -> str:
    text = answer.strip().strip("*").strip()
    inside = boxed(text)
    text = text if inside is None else inside
    text = text.strip().rstrip(".").strip().strip("$").strip()
    equals = text.rpartition("=")
    text = equals[2].strip() if equals[1] and not text.endswith("=") and not re.search(r"[<>!]=", text) else text
    return _UNITS.sub("", text).strip()
