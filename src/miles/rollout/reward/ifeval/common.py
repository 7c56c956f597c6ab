"""Helpers of instruction checks: typed access to an instruction's arguments, and splitting of text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from miles.rollout.reward.types import BadLabel

Settings = Mapping[str, Any]
Check = Callable[[str, Settings], bool]
"""Whether a response follows an instruction with these arguments."""

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_ENDING = re.compile(r"[.!?…。！？]+[\"'”’)\]*]*(?=\s|$)|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig|Jr|Sr|[A-Z])|^\s*\d+)\.$", re.MULTILINE
)
_RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "less than": lambda count, bound: count < bound,
    "at least": lambda count, bound: count >= bound,
    "at most": lambda count, bound: count <= bound,
    "more than": lambda count, bound: count > bound,
    "exactly": lambda count, bound: count == bound,
}


def get_int(settings: Settings, key: str) -> int:
    """An integer argument; data files often hold it as 3.0."""
    value = settings.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value):
        raise BadLabel(f"an instruction needs a whole number in {key}, and has {value!r}")
    return int(value)


def get_text(settings: Settings, key: str) -> str:
    """A text argument that is not empty."""
    value = settings.get(key)
    if not isinstance(value, str) or not value.strip():
        raise BadLabel(f"an instruction needs a text in {key}, and has {value!r}")
    return value


def get_texts(settings: Settings, key: str) -> list[str]:
    """A list argument of one or more texts."""
    value = settings.get(key)
    if not isinstance(value, list | tuple) or not value or not all(isinstance(one, str) and one for one in value):
        raise BadLabel(f"an instruction needs a list of texts in {key}, and has {value!r}")
    return list(value)


def compare_count(count: int, settings: Settings, bound: str, relation: str) -> bool:
    """Compare a count to the argument ``bound`` with the relation that the argument ``relation`` names."""
    name = get_text(settings, relation).strip().lower()
    if name not in _RELATIONS:
        raise BadLabel(f"an instruction's {relation} is {name!r}, and must be one of {', '.join(_RELATIONS)}")
    return _RELATIONS[name](count, get_int(settings, bound))


def split_words(text: str) -> list[str]:
    """Split into words, without punctuation around them.

    >>> split_words("Don't stop, well-being!")
    ["Don't", 'stop', 'well-being']
    """
    return _WORD.findall(text)


def split_sentences(text: str) -> list[str]:
    """Split into sentences with their ends; a blank line ends one, an abbreviation or a list number does not.

    >>> split_sentences("Dr. No came. Why? 3.5 times!")
    ['Dr. No came.', 'Why?', '3.5 times!']
    """
    found, start = [], 0
    for ending in _ENDING.finditer(text):
        if ending[0] == "." and _ABBREVIATION.search(text[max(start, ending.end() - 20) : ending.end()]):
            continue
        found.append(text[start : ending.end()].strip())
        start = ending.end()
    return [sentence for sentence in (*found, text[start:].strip()) if split_words(sentence)]


def split_lines(text: str) -> list[str]:
    """Split into lines that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


def split_paragraphs(text: str) -> list[str]:
    """Split into paragraphs at blank lines."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
