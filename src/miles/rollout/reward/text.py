"""Graders of plain text: pure functions of a reply and a label, each giving 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter
from hashlib import sha256

_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(reply: str, label: str) -> float:
    """The reply is the label, white space around both aside."""
    return float(reply.strip() == label.strip())


def contains(reply: str, label: str) -> float:
    """The label appears in the reply."""
    wanted = label.strip()
    if not wanted:
        raise ValueError("an empty label is contained in every reply")
    return float(wanted in reply)


def last_int(reply: str, label: str) -> float:
    """The last number of the reply is the label's integer."""
    wanted = _integer(label.strip())
    if wanted is None:
        raise ValueError(f"the label {label!r} is not an integer")
    found = _NUMBER.findall(reply)
    return float(bool(found) and _integer(found[-1]) == wanted)


def f1(reply: str, label: str) -> float:
    """The harmonic mean of precision and recall of the label's words, case, punctuation and articles aside."""
    said, wanted = _bag(reply), _bag(label)
    if not said or not wanted:
        return float(said == wanted)
    shared = (said & wanted).total()
    return 2 * shared / (said.total() + wanted.total())


def regex(reply: str, label: str) -> float:
    """The whole reply, white space around it aside, matches the pattern that is the label."""
    try:
        return float(re.fullmatch(label, reply.strip()) is not None)
    except re.error as error:
        raise ValueError(f"the label {label!r} is not a regular expression ({error})") from error


def deterministic_random(reply: str, label: str) -> float:
    """0 or 1 by a hash of the reply: chance, but the same for the same text."""
    return float(sha256(reply.encode()).digest()[0] & 1)


def _integer(text: str) -> int | None:
    number = _NUMBER.fullmatch(text)
    if number is None or len(text) > 400:
        return None
    whole, _, fraction = text.replace(",", "").replace("−", "-").partition(".")
    return None if fraction.strip("0") else int(whole)


def _bag(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
