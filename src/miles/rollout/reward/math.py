"""Is a mathematical answer the right one? Equality of normalised notation and of exact rational values.

Whether two different formulas mean the same (``x(x+1)`` and ``x^2+x``) needs a computer algebra
system; that is another matter, and here they differ.
"""

from __future__ import annotations

import re
from fractions import Fraction

from miles.rollout.reward.boxed import boxed

_LONGEST = 400  # characters: an answer that is longer is not one, and cost stays small whatever a policy writes
_WORDS = r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)"
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_THOUSANDS = re.compile(r"([+-]?\d{1,3}(?:,\d{3})+)(\.\d+)?")
_FRACTION = re.compile(r"([+-]?)\\frac\{([^{}]*)\}\{([^{}]*)\}")
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
)


def grade(reply: str, label: str) -> float:
    r"""1 when the reply's last box holds the label's value; the label may be boxed or end in ``#### value``."""
    answer = boxed(reply)
    return 0.0 if answer is None else float(same(answer, truth(label)))


def truth(label: str) -> str:
    """The value a label states."""
    inside = boxed(label)
    return label.rpartition("####")[2] if inside is None else inside


def same(one: str, other: str) -> bool:
    r"""Do two answers agree?

    >>> same(r"\dfrac12", "0.5"), same("(1, 2)", "(1,2.0)"), same("x+1", "1+x")
    (True, True, False)
    """
    if max(len(one), len(other)) > _LONGEST:
        return one.strip() == other.strip()
    return _equal(normalise(one), normalise(other))


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


def _ratio(above: str, below: str) -> Fraction | None:
    if not _NUMBER.fullmatch(above) or not _NUMBER.fullmatch(below) or Fraction(below) == 0:
        return None
    return Fraction(above) / Fraction(below)


def _equal(one: str, other: str) -> bool:
    if one == other or (min(len(one), len(other)) > 1 and one.isalpha() and one.casefold() == other.casefold()):
        return True
    a, b = number(one), number(other)
    if a is not None and b is not None:
        return a == b
    (left, *brackets), (right, *others) = _parts(one), _parts(other)
    if brackets != others or len(left) != len(right) or (len(left) < 2 and not brackets[0]):
        return False
    return _same_set(left, right) if brackets == ["{", "}"] else all(map(_equal, left, right))


def _same_set(left: list[str], right: list[str]) -> bool:
    rest = list(right)
    for value in left:
        twin = next((at for at, candidate in enumerate(rest) if _equal(value, candidate)), None)
        if twin is None:
            return False
        del rest[twin]
    return True


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
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _split(text[2:-2]), "{", "}"
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]":
        return _split(text[1:-1]), text[0], text[-1]
    return _split(text), "", ""


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
