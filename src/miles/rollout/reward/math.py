"""Math graders: equality of normalized LaTeX notation and of exact rational values.

Most answers are decided here, for certain and at once. Whether two different formulas are equivalent (``x(x+1)`` and
``x^2+x``) is left to the computer algebra system in ``symbolic``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.reward.text import extract_boxed
from miles.rollout.reward.types import BadLabel, Metadata

MAX_CHARS = 400  # of an answer, which bounds the cost whatever a policy writes
_TEXT_COMMANDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:,\d{3})+)(\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]*)\}\{([^{}]*)\}")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_POWER_OF_TEN = re.compile(r"([+-]?[\d.]+)(?:\\times|\\cdot)10\^\{?([+-]?\d{1,3})\}?")
_WITH_UNIT = re.compile(rf"(.+?){_TEXT_COMMANDS}\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\{?\w\}?)?\s*=(?!=)(.*)", re.DOTALL)
_CHANNEL_END = "<channel|>"
_THINKING_ENDS = ("</think>", "###Response")
_REWRITES = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:left|right|big|Big|bigl|bigr|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\[!,;: ]|\\q?quad(?![A-Za-z])|~"), ""),
    (re.compile(r"\^\{?\\circ\}?|\\degree|°"), ""),
    (re.compile(r"\\?%|\\\$|\$|\\[()\[\]]"), ""),
    (re.compile(rf"{_TEXT_COMMANDS}\{{([^{{}}]*)\}}"), r"\1"),
    (re.compile(r"\s+"), ""),
    (re.compile(r"\\frac(\d)(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\sqrt(\d)"), r"\\sqrt{\1}"),
    (re.compile(r"\^\{(\w)\}"), r"^\1"),
    (re.compile(r"_\{(\w)\}"), r"_\1"),
    (re.compile(r"\\(?:le|leq)(?![A-Za-z])"), r"\\leq"),
    (re.compile(r"\\(?:ge|geq)(?![A-Za-z])"), r"\\geq"),
    (re.compile(r"[−–]"), "-"),
    (re.compile(r"π"), r"\\pi"),
    (re.compile(r"∞"), r"\\infty"),
    (re.compile(r"×"), r"\\times"),
    (re.compile(r"≤"), r"\\leq"),
    (re.compile(r"≥"), r"\\geq"),
)


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """1 when the response's last box holds the label's value, as far as that can be decided without algebra."""
    pair = extract_sides(reply, label)
    return float(pair is not None and is_equal(*pair))


def extract_sides(reply: str, label: str) -> tuple[str, str] | None:
    r"""The response's last box and the label's value (boxed, or after ``####``); None without a box."""
    expected, answer = parse_label(label), extract_boxed(reply)
    return None if not answer else (answer, expected)


def extract_sides_after_thinking(reply: str, label: str) -> tuple[str, str] | None:
    """As ``extract_sides``, but the box must follow the end of the thinking (DeepScaleR); None without that end."""
    expected = parse_label(label)
    for ending in _THINKING_ENDS:
        if ending in reply:
            return extract_sides(reply.rpartition(ending)[2], expected)
    return None


def extract_sides_after_channel(reply: str, label: str) -> tuple[str, str] | None:
    """As ``extract_sides``, in the text after the last end of a thinking channel (Gemma 4), or in all without one."""
    return extract_sides(reply.rpartition(_CHANNEL_END)[2], label)


def parse_label(label: str) -> str:
    """The value a label states: boxed, after ``####``, or all of it."""
    inside = extract_boxed(label)
    value = (label.rpartition("####")[2] if inside is None else inside).strip()
    if not value:
        raise BadLabel(f"the label {label!r} states no value")
    return value


def is_equal(one: str, other: str) -> bool:
    r"""Whether two answers are certainly equal.

    >>> is_equal(r"\dfrac12", "0.5"), is_equal("(1, 2)", "(1,2.0)"), is_equal("x+1", "1+x")
    (True, True, False)
    """
    return compare(one, other) is True


def compare(one: str, other: str) -> bool | None:
    r"""Whether two answers are equal, or None when only algebra can decide.

    >>> compare("0.5", r"\frac12"), compare("2", "3"), compare("x+1", "1+x")
    (True, False, None)
    """
    if max(len(one), len(other)) > MAX_CHARS:
        return one.strip() == other.strip()
    left, right = normalize(one), normalize(other)
    if "%" in one + other and _differ_by_percent(one, left, other, right):
        return True
    return _equal(left, right)


def normalize(answer: str) -> str:
    """Rewrite equivalent notations to one form."""
    text = answer.strip().rstrip(".").strip()
    assigned = _ASSIGNMENT.fullmatch(text.strip("$ "))
    text = assigned[1] if assigned else text
    with_unit = _WITH_UNIT.fullmatch(text)
    if with_unit and parse_number(_rewrite(with_unit[1])) is not None:
        text = with_unit[1]
    return _unwrap(_rewrite(text))


def parse_number(text: str) -> Fraction | None:
    """The exact value of normalized text that is a decimal, a fraction or a mixed number, else None."""
    if thousands := _THOUSANDS.fullmatch(text):
        text = thousands[1].replace(",", "") + (thousands[2] or "")
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    if repeating := _REPEATING.fullmatch(text):
        return _repeating(*repeating.groups())
    if mixed := _MIXED.fullmatch(text):
        sign, whole, above, below = mixed.groups()
        rest = _ratio(above, below)
        return None if rest is None else (-1 if sign == "-" else 1) * (int(whole) + rest)
    if fraction := _FRACTION.fullmatch(text):
        ratio = _ratio(fraction[2], fraction[3])
        return ratio if ratio is None or fraction[1] != "-" else -ratio
    if scientific := _POWER_OF_TEN.fullmatch(text):
        factor = parse_number(scientific[1])
        return None if factor is None else factor * Fraction(10) ** int(scientific[2])
    above, slash, below = text.partition("/")
    return _ratio(above, below) if slash else None


def _repeating(sign: str, whole: str, fixed: str, cycle: str) -> Fraction:
    """The value of a repeating decimal."""
    once = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    value = Fraction(f"{whole or 0}.{fixed or 0}") + once
    return -value if sign == "-" else value


def _ratio(above: str, below: str) -> Fraction | None:
    if not _NUMBER.fullmatch(above) or not _NUMBER.fullmatch(below) or Fraction(below) == 0:
        return None
    return Fraction(above) / Fraction(below)


def _differ_by_percent(one: str, left: str, other: str, right: str) -> bool:
    """Whether one is a percentage of the other: 50% equals 0.5, and also 50."""
    percent, plain = (left, right) if "%" in one else (right, left)
    a, b = parse_number(percent), parse_number(plain)
    return ("%" in one) != ("%" in other) and a is not None and b is not None and a == 100 * b


def _equal(one: str, other: str) -> bool | None:
    if one == other:
        return True
    if one.isalpha() and other.isalpha():  # words, or single letters whose case matters
        return min(len(one), len(other)) > 1 and one.casefold() == other.casefold()
    a, b = parse_number(one), parse_number(other)
    if a is not None and b is not None:
        return a == b
    (left, opens, closes), (right, *others) = _parts(one), _parts(other)
    if (opens and others[0] and [opens, closes] != others) or (
        len(left) != len(right) and min(map(len, (left, right))) > 1
    ):
        return False
    kinds = {opens + closes, "".join(others)}
    if kinds <= {"", "{}"} and (kinds != {""} or len(left) > 1):
        return _equal_as_sets(left, right)
    return _equal_in_order(left, right) if len(kinds) == 1 and len(left) == len(right) > 1 else None


def _equal_in_order(left: list[str], right: list[str]) -> bool | None:
    verdicts = [_equal(a, b) for a, b in zip(left, right, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _equal_as_sets(left: list[str], right: list[str]) -> bool | None:
    """Whether the values match as sets; None while a remaining pair is undecided."""
    rest, unmatched = list(right), []
    for value in left:
        match_at = next((at for at, candidate in enumerate(rest) if _equal(value, candidate)), None)
        if match_at is None:
            unmatched.append(value)
        else:
            del rest[match_at]
    if not unmatched and not rest:
        return True
    return None if any(_equal(a, b) is None for a in unmatched for b in rest) else False


def _rewrite(text: str) -> str:
    for pattern, spelling in _REWRITES:
        text = pattern.sub(spelling, text)
    return text


def _unwrap(text: str) -> str:
    """Remove parentheses or braces around a single value."""
    while len(text) > 2 and text[0] in "({" and _closes_at(text) == len(text) - 1 and len(_split(text[1:-1])) == 1:
        text = text[1:-1]
    return text


def _parts(text: str) -> tuple[list[str], str, str]:
    r"""Split a tuple, interval, set or list into its values and brackets."""
    if text.startswith(r"\{") and text.endswith(r"\}") and r"\}" not in text[:-2]:
        return _split(text[2:-2]), "{", "}"
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _is_enclosed(text) and len(_split(text[1:-1])) > 1:
        return _split(text[1:-1]), text[0], text[-1]
    return _split(text), "", ""


def _is_enclosed(text: str) -> bool:
    """Whether the first bracket closes at the end; an interval's two brackets may differ."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if depth == 0:
            return at == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    values = []
    depth = 0
    start = 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            values.append(text[start:at])
            start = at + 1
    return [*values, text[start:]]


def _closes_at(text: str) -> int:
    """The index where the opening bracket is closed, or -1."""
    depth, closing = 0, ")" if text[0] == "(" else "}"
    for at, char in enumerate(text):
        depth += (char == text[0]) - (char == closing)
        if depth == 0:
            return at
    return -1
