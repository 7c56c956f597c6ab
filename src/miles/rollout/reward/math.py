"""Is a mathematical answer the right one? Equality of normalised notation and of exact rational values.

Most answers are decided here, for certain and at once. Whether two different formulas mean the same
(``x(x+1)`` and ``x^2+x``) is left open, for the computer algebra system of ``symbolic``.
"""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.reward.boxed import boxed
from miles.rollout.reward.score import BadLabel, Metadata

LONGEST = 400  # characters: an answer that is longer is not one, and cost stays small whatever a policy writes
_WORDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:,\d{3})+)(\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]*)\}\{([^{}]*)\}")
_REPEATING = re.compile(r"([+-]?)(\d*)\.(\d*)\\overline\{(\d+)\}")
_MIXED = re.compile(r"([+-]?)(\d+)\\frac\{(\d+)\}\{(\d+)\}")
_POWER_OF_TEN = re.compile(r"([+-]?[\d.]+)(?:\\times|\\cdot)10\^\{?([+-]?\d{1,3})\}?")
_WITH_UNIT = re.compile(rf"(.+?){_WORDS}\{{[^{{}}]*\}}(?:\^\{{?\d\}}?)?", re.DOTALL)
_ASSIGNMENT = re.compile(r"[A-Za-z](?:_\{?\w\}?)?\s*=(?!=)(.*)", re.DOTALL)
_REWRITES = (
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\(?:left|right|big|Big|bigl|bigr|displaystyle)(?![A-Za-z])"), ""),
    (re.compile(r"\\[!,;: ]|\\q?quad(?![A-Za-z])|~"), ""),
    (re.compile(r"\^\{?\\circ\}?|\\degree|°"), ""),
    (re.compile(r"\\?%|\\\$|\$|\\[()\[\]]"), ""),
    (re.compile(rf"{_WORDS}\{{([^{{}}]*)\}}"), r"\1"),
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
    """1 when the reply's last box holds the label's value, as far as that can be told without algebra."""
    pair = sides(reply, label)
    return float(pair is not None and same(*pair))


def sides(reply: str, label: str) -> tuple[str, str] | None:
    r"""The reply's last box and the label's value, which may be boxed or end in ``#### value``; None without a box."""
    wanted, answer = truth(label), boxed(reply)
    return None if not answer else (answer, wanted)


def truth(label: str) -> str:
    """The value a label states."""
    inside = boxed(label)
    value = (label.rpartition("####")[2] if inside is None else inside).strip()
    if not value:
        raise BadLabel(f"the label {label!r} states no value")
    return value


def same(one: str, other: str) -> bool:
    r"""Do two answers agree for certain?

    >>> same(r"\dfrac12", "0.5"), same("(1, 2)", "(1,2.0)"), same("x+1", "1+x")
    (True, True, False)
    """
    return compare(one, other) is True


def compare(one: str, other: str) -> bool | None:
    r"""Whether two answers agree, or None when only algebra can tell.

    >>> compare("0.5", r"\frac12"), compare("2", "3"), compare("x+1", "1+x")
    (True, False, None)
    """
    if max(len(one), len(other)) > LONGEST:
        return one.strip() == other.strip()
    left, right = normalise(one), normalise(other)
    if "%" in one + other and _differ_by_percent(one, left, other, right):
        return True
    return _equal(left, right)


def normalise(answer: str) -> str:
    """One spelling for notations that differ only in looks."""
    text = answer.strip().rstrip(".").strip()
    assigned = _ASSIGNMENT.fullmatch(text.strip("$ "))
    text = assigned[1] if assigned else text
    with_unit = _WITH_UNIT.fullmatch(text)
    if with_unit and number(_rewritten(with_unit[1])) is not None:
        text = with_unit[1]
    return _unwrapped(_rewritten(text))


def number(text: str) -> Fraction | None:
    """The exact value of normalised text that is a decimal, a fraction or a mixed number, else None."""
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
        factor = number(scientific[1])
        return None if factor is None else factor * Fraction(10) ** int(scientific[2])
    above, slash, below = text.partition("/")
    return _ratio(above, below) if slash else None


def _repeating(sign: str, whole: str, fixed: str, cycle: str) -> Fraction:
    """The value of a decimal whose last digits repeat for ever."""
    once = Fraction(int(cycle), 10 ** len(fixed) * (10 ** len(cycle) - 1))
    value = Fraction(f"{whole or 0}.{fixed or 0}") + once
    return -value if sign == "-" else value


def _ratio(above: str, below: str) -> Fraction | None:
    if not _NUMBER.fullmatch(above) or not _NUMBER.fullmatch(below) or Fraction(below) == 0:
        return None
    return Fraction(above) / Fraction(below)


def _differ_by_percent(one: str, left: str, other: str, right: str) -> bool:
    """Whether one is a percentage and the other the share it stands for: 50% is 0.5, and it is 50 too."""
    percent, plain = (left, right) if "%" in one else (right, left)
    a, b = number(percent), number(plain)
    return ("%" in one) != ("%" in other) and a is not None and b is not None and a == 100 * b


def _equal(one: str, other: str) -> bool | None:
    if one == other:
        return True
    if one.isalpha() and other.isalpha():  # words, or single letters whose case matters
        return min(len(one), len(other)) > 1 and one.casefold() == other.casefold()
    a, b = number(one), number(other)
    if a is not None and b is not None:
        return a == b
    (left, opens, closes), (right, *others) = _parts(one), _parts(other)
    if (opens and others[0] and [opens, closes] != others) or (
        len(left) != len(right) and min(map(len, (left, right))) > 1
    ):
        return False
    kinds = {opens + closes, "".join(others)}
    if kinds <= {"", "{}"} and (kinds != {""} or len(left) > 1):
        return _same_set(left, right)
    return _all_same(left, right) if len(kinds) == 1 and len(left) == len(right) > 1 else None


def _all_same(left: list[str], right: list[str]) -> bool | None:
    verdicts = [_equal(a, b) for a, b in zip(left, right, strict=True)]
    return False if False in verdicts else None if None in verdicts else True


def _same_set(left: list[str], right: list[str]) -> bool | None:
    """Whether each has its twin; open while a pair is that might be one."""
    rest, left_over = list(right), []
    for value in left:
        twin = next((at for at, candidate in enumerate(rest) if _equal(value, candidate)), None)
        if twin is None:
            left_over.append(value)
        else:
            del rest[twin]
    if not left_over and not rest:
        return True
    return None if any(_equal(a, b) is None for a in left_over for b in rest) else False


def _rewritten(text: str) -> str:
    for pattern, spelling in _REWRITES:
        text = pattern.sub(spelling, text)
    return text


def _unwrapped(text: str) -> str:
    """Without parentheses or braces around the whole of a single value."""
    while len(text) > 2 and text[0] in "({" and _closes_at(text) == len(text) - 1 and len(_split(text[1:-1])) == 1:
        text = text[1:-1]
    return text


def _parts(text: str) -> tuple[list[str], str, str]:
    r"""The comma-separated values of a tuple, interval, set or list, and the brackets around them."""
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
    """Cut at the commas that no bracket encloses."""
    values, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            values.append(text[start:at])
            start = at + 1
    return [*values, text[start:]]


def _closes_at(text: str) -> int:
    """Where the bracket that opens the text is closed, or -1."""
    depth, closing = 0, ")" if text[0] == "(" else "}"
    for at, char in enumerate(text):
        depth += (char == text[0]) - (char == closing)
        if depth == 0:
            return at
    return -1
