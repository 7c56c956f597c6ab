"""Graders of plain text: pure functions of a reply and a label, each giving 0 to 1."""

from __future__ import annotations

import re
import string
from collections import Counter

from miles.rollout.reward.score import BadLabel, Metadata

_NUMBER = re.compile(r"(?:(?<![\w)\]])[-+−])?\d+(?:,\d{3}(?!\d))*(?:\.\d+)?")
_ALL_OR_NOTHING = ("yes", "no", "noanswer")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(reply: str, label: str, metadata: Metadata) -> float:
    """The reply is the label, white space around both aside."""
    return float(reply.strip() == label.strip())


def contains(reply: str, label: str, metadata: Metadata) -> float:
    """The label appears in the reply."""
    wanted = label.strip()
    if not wanted:
        raise BadLabel("an empty label is contained in every reply")
    return float(wanted in reply)


def last_int(reply: str, label: str, metadata: Metadata) -> float:
    """The last number of the reply is the label's integer."""
    wanted = _integer(label.strip())
    if wanted is None:
        raise BadLabel(f"the label {label!r} is not an integer")
    found = _NUMBER.findall(reply)
    return float(bool(found) and _integer(found[-1]) == wanted)


def f1(reply: str, label: str, metadata: Metadata) -> float:
    """The harmonic mean of precision and recall of the label's words, case, punctuation and articles aside.

    A label of yes, no or noanswer is all or nothing. ``metadata["answers"]`` may list further right
    answers; the best match counts.
    """
    others = metadata.get("answers", ())
    if isinstance(others, str) or not all(isinstance(answer, str) for answer in others):
        raise BadLabel("metadata['answers'] must be a list of texts")
    return max(_overlap(reply, answer) for answer in (label, *others))


def regex(reply: str, label: str, metadata: Metadata) -> float:
    """The whole reply, white space around it aside, matches the pattern that is the label."""
    try:
        return float(re.fullmatch(label, reply.strip()) is not None)
    except re.error as error:
        raise BadLabel(f"the label {label!r} is not a regular expression ({error})") from error


def _integer(text: str) -> int | None:
    number = _NUMBER.fullmatch(text)
    if number is None or len(text) > 400:
        return None
    whole, _, fraction = text.replace(",", "").replace("−", "-").partition(".")
    return None if fraction.strip("0") else int(whole)


def _overlap(reply: str, answer: str) -> float:
    said, wanted = _bag(reply), _bag(answer)
    if not said or not wanted or any(" ".join(bag.elements()) in _ALL_OR_NOTHING for bag in (said, wanted)):
        return float(said == wanted)
    return 2 * (said & wanted).total() / (said.total() + wanted.total())


def _bag(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
