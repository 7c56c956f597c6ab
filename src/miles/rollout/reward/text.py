"""Text graders: pure functions of a response and a label, each returning 0 to 1; and extraction of boxed answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from hashlib import sha256

from miles.rollout.reward.types import BadLabel, Metadata

_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_ALL_OR_NOTHING = ("yes", "no", "noanswer")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_BOX_TOKEN = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def extract_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\\boxed{...}`` (of nested boxes, the innermost), or None without one.

    >>> extract_boxed(r"so \boxed{\frac{1}{2}}, that is \boxed{0.5} or \boxed{")
    '0.5'
    """
    opened: list[int] = []  # per open brace: where its box's content begins, or -1 for a plain brace
    matches = (-1, -1)
    for token in _BOX_TOKEN.finditer(text):
        if token[0] == "{":
            opened.append(-1)
        elif token[0].endswith("{") and len(token[0]) > 2:
            opened.append(token.end())
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start > matches[0]:  # otherwise a plain brace, or a box around the one found
                matches = (start, token.start())
    return None if matches[0] < 0 else text[matches[0] : matches[1]].strip()


def exact(reply: str, label: str, metadata: Metadata) -> float:
    """The response equals the label, except for white space around both."""
    return float(reply.strip() == label.strip())


def contains(reply: str, label: str, metadata: Metadata) -> float:
    """The label appears in the response."""
    expected = label.strip()
    if not expected:
        raise BadLabel("an empty label is contained in every reply")
    return float(expected in reply)


def last_int(reply: str, label: str, metadata: Metadata) -> float:
    """The last number of the response is the label's integer."""
    expected = _parse_int(label.strip())
    if expected is None:
        raise BadLabel(f"the label {label!r} is not an integer")
    matches = _NUMBER.findall(reply)
    return float(bool(matches) and _parse_int(matches[-1]) == expected)


def f1(reply: str, label: str, metadata: Metadata) -> float:
    """Token F1 of the response and the label, ignoring case, punctuation and articles.

    A label of yes, no or noanswer is all or nothing. ``metadata["answers"]`` may list further correct answers; the
    best match counts.
    """
    alternatives = metadata.get("answers", ())
    if isinstance(alternatives, str) or not all(isinstance(answer, str) for answer in alternatives):
        raise BadLabel("metadata['answers'] must be a list of texts")
    return max(measure_token_f1(reply, answer)[0] for answer in (label, *alternatives))


def regex(reply: str, label: str, metadata: Metadata) -> float:
    """The whole response, except white space around it, matches the pattern in the label."""
    try:
        return float(re.fullmatch(label, reply.strip()) is not None)
    except re.error as error:
        raise BadLabel(f"the label {label!r} is not a regular expression ({error})") from error


def deterministic_random(reply: str, label: str, metadata: Metadata) -> float:
    """0 or 1 by a hash of the response: random, but the same for the same text."""
    return float(sha256(reply.encode("utf-8", "surrogatepass")).digest()[0] & 1)


def _parse_int(text: str) -> int | None:
    number = _NUMBER.fullmatch(text)
    if number is None or len(text) > 400:
        return None
    whole, _, fraction = text.replace(",", "").replace("−", "-").partition(".")
    return None if fraction.strip("0") else int(whole)


def measure_token_f1(reply: str, answer: str) -> tuple[float, float, float]:
    """F1, precision and recall of a response's words."""
    response_words, expected = _count_words(reply), _count_words(answer)
    if (
        not response_words
        or not expected
        or any(" ".join(bag.elements()) in _ALL_OR_NOTHING for bag in (response_words, expected))
    ):
        equal = float(response_words == expected)
        return equal, equal, equal
    shared = (response_words & expected).total()
    f1 = 2 * shared / (response_words.total() + expected.total())
    return f1, shared / response_words.total(), shared / expected.total()


def _count_words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
