"""The built-in rewards by name (``--rm-type``), as pure functions from a reply and a label to a score."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from miles.core.errors import UsageError
from miles.rollout.reward import math, text
from miles.rollout.reward.boxed import boxed

Grade = Callable[[str, str], float]

BOXED = "boxed_"
RANDOM = "random"
GRADES: Mapping[str, Grade] = MappingProxyType(
    {
        "exact": text.exact,
        "contains": text.contains,
        "int": text.last_int,
        "last_int": text.last_int,
        "math": math.grade,
        "f1": text.f1,
        "regex": text.regex,
        "deterministic_random": text.deterministic_random,
    }
)
UNLABELLED = frozenset({RANDOM, "deterministic_random", BOXED + "deterministic_random"})


def check_name(name: str) -> None:
    """Refuse a name that is not in the table, with a hint."""
    names = [*GRADES, RANDOM]
    if name in names or name.removeprefix(BOXED) in GRADES:
        return
    close = difflib.get_close_matches(name.removeprefix(BOXED), names, n=1)
    hint = f"did you mean {close[0]}?" if close else "or bring your own with --custom-rm-path."
    raise UsageError(f"--rm-type {name} is not a built-in reward; there are {', '.join(names)}; {hint}")


def grade_of(name: str) -> Grade:
    """The grader called ``name``; with ``boxed_`` before it, it is shown only the boxed answer, and no box is 0."""
    check_name(name)
    assert name != RANDOM, "this one reads no text"
    if name in GRADES:
        return GRADES[name]
    inner = name.removeprefix(BOXED)
    if inner == "math":  # it looks for the box itself
        return math.grade
    return lambda reply, label: _of_box(GRADES[inner], reply, label)


def _of_box(grade: Grade, reply: str, label: str) -> float:
    answer = boxed(reply)
    return 0.0 if answer is None else grade(answer, label)
