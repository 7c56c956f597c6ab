"""Grade-school arithmetic: the number a reply ends with, against the number after ``####`` in the label."""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.reward.score import BadLabel, Metadata

_NUMBER = re.compile(r"(?:(?<![\w)\].])[-+−])?(?:\d+(?:,\d{3}(?!\d))*(?:\.\d+)?|\.\d+)")
_LONGEST = 400  # digits: no sum of sheep has more, and cost stays small whatever a policy writes


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """1 when the number after the reply's last ``####``, or else its last number, is the label's."""
    wanted = _last(label.rpartition("####")[2])
    if wanted is None:
        raise BadLabel(f"the label {label!r} ends in no number")
    _, marked, after = reply.rpartition("####")
    if marked:
        first = _NUMBER.search(after)
        return float(first is not None and _value(first[0]) == wanted)
    return float(_last(reply) == wanted)


def _last(text: str) -> Fraction | None:
    found = _NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(text: str) -> Fraction | None:
    return Fraction(text.replace(",", "").replace("−", "-")) if len(text) <= _LONGEST else None
