"""A reply cut into words, sentences, lines and paragraphs."""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+(?:['’-]\w+)*")
_ENDING = re.compile(r"[.!?…。！？]+[\"'”’)\]*]*(?=\s|$)|\n\s*\n")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|Fig|Jr|Sr|[A-Z])|^\s*\d+)\.$", re.MULTILINE
)


def words(text: str) -> list[str]:
    """The words, without punctuation around them.

    >>> words("Don't stop, well-being!")
    ["Don't", 'stop', 'well-being']
    """
    return _WORD.findall(text)


def sentences(text: str) -> list[str]:
    """The sentences, with their ends; a blank line ends one, an abbreviation or a list's number does not.

    >>> sentences("Dr. No came. Why? 3.5 times!")
    ['Dr. No came.', 'Why?', '3.5 times!']
    """
    found, start = [], 0
    for ending in _ENDING.finditer(text):
        if ending[0] == "." and _ABBREVIATION.search(text[max(start, ending.end() - 20) : ending.end()]):
            continue
        found.append(text[start : ending.end()].strip())
        start = ending.end()
    return [sentence for sentence in (*found, text[start:].strip()) if words(sentence)]


def lines(text: str) -> list[str]:
    """The lines that are not blank."""
    return [line for line in text.splitlines() if line.strip()]


def paragraphs(text: str) -> list[str]:
    """What blank lines part."""
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
