"""GSM8K grader: the number a response ends with, against the number after ``####`` in the label."""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.reward.types import BadLabel, Metadata

_NUMBER = re.compile(r"(?:(?<![\w)\].])[-+−])?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)")
_MAX_DIGITS = 400  # digits, which bounds the cost whatever a policy writes


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """1 when the number after the response's last ``####``, or else its last number, equals the label's."""
    expected = _last_number(label.rpartition("####")[2])
    if expected is None:
        raise BadLabel(f"the label {label!r} ends in no number")
    _, marked, after = reply.rpartition("####")
    if marked:
        first = _NUMBER.search(after)
        return float(first is not None and _parse_number(first[0]) == expected)
    return float(_last_number(reply) == expected)


def _last_number(text: str) -> Fraction | None:
    numbers = _NUMBER.findall(text)
    return _parse_number(numbers[-1]) if numbers else None


def _parse_number(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "").replace("−", "-")) if len(text) <= _MAX_DIGITS else None
