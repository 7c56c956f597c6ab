"""Multiple choice: which letter a reply settles on, or which choice's text, against the right one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from miles.rollout.reward.boxed import boxed
from miles.rollout.reward.score import BadLabel, Metadata

_MOST = string.ascii_uppercase[:10]
_LETTER = r"[\"'(\[*_$]*(?:\\(?:text|textbf|mathrm|mathbf)\{)?\(?([A-Z])(?![A-Za-z'’])[\"')\]}*_$.]*"
_STATED = re.compile(
    r"\b(?:answer|option|choice)\b[\s*_]*(?:is|are|:|=|would be|should be|must be)?[\s*_:]*(?:option|choice)?\s*"
    + _LETTER,
    re.IGNORECASE,
)
_CORRECT = re.compile(rf"{_LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best)\b")
_ALONE = re.compile(rf"\s*{_LETTER}\s*")
_LEADING = re.compile(r"\s*[*_]*\(?([A-Z])[).:][*_]*\s+\S")
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_ANOTHER = re.compile(r"\s*(?:or|and|,|/|&)\s*[(*\"']*([A-Z])(?![A-Za-z'’])")


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """1 when the reply, after its thinking, settles on the right letter; or names none, but the right choice's text.

    The right one is ``metadata["correct_letter"]``, or the label: a letter, or a choice's text.
    ``metadata["choices"]`` is a list of texts or a mapping from letters to texts; ``metadata["valid_letters"]``
    says which letters there are, when there are no choices (A to J otherwise).
    """
    choices = _choices(metadata)
    letters = _letters(metadata, choices)
    right = _right_letter(label.strip(), metadata, choices, letters)
    said = reply.rpartition("</think>")[2]
    letter = chosen_letter(said, letters)
    if letter is None and choices:
        letter = _chosen_text(boxed(said) or said, choices)
    return float(letter == right)


def chosen_letter(text: str, letters: str) -> str | None:
    r"""The letter a text settles on: in its last box, after its last "answer is", alone on its last line, and so on.

    >>> chosen_letter("Not (A). The answer is **B**.", "ABCD"), chosen_letter("A or B", "ABCD")
    ('B', None)
    """
    box = boxed(text)
    if box is not None:
        alone = _ALONE.fullmatch(box.replace(r"\ ", " ")) or _LEADING.match(box)
        return _valid(alone, box, letters)
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    for pattern, where in ((_STATED, text), (_CORRECT, text)):
        found = [match for match in pattern.finditer(where) if match[1].isupper() and match[1] in letters]
        if found:
            return _valid(found[-1], where, letters)
    alone = _ALONE.fullmatch(last) or _LEADING.match(last)
    if alone is not None:
        return _valid(alone, last, letters)
    if len(lines) > 1 and (first := _ALONE.fullmatch(lines[0])) is not None:
        return _valid(first, lines[0], letters)
    shown = [match for match in _PARENTHESISED.finditer(last) if match[1] in letters]
    return _valid(shown[-1], last, letters) if shown else None


def _valid(match: re.Match[str] | None, text: str, letters: str) -> str | None:
    """The letter, unless the text goes on to name another one: two answers are none."""
    if match is None or match[1] not in letters:
        return None
    another = _ANOTHER.match(text, match.end())
    return None if another is not None and another[1] in letters and another[1] != match[1] else match[1]


def _choices(metadata: Metadata) -> Mapping[str, str]:
    given: Any = metadata.get("choices")
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in given.items()}
    if isinstance(given, str) or len(given) > len(string.ascii_uppercase):
        raise BadLabel("metadata['choices'] must be a list of texts, or a mapping from letters to texts")
    return dict(zip(string.ascii_uppercase, map(str, given), strict=False))


def _letters(metadata: Metadata, choices: Mapping[str, str]) -> str:
    given = metadata.get("valid_letters")
    return "".join(str(letter).strip().upper() for letter in given) if given else "".join(choices) or _MOST


def _right_letter(label: str, metadata: Metadata, choices: Mapping[str, str], letters: str) -> str:
    stated = metadata.get("correct_letter")
    wanted = (stated.strip() if isinstance(stated, str) else label).strip("()[]. ")
    if len(wanted) == 1 and wanted.upper() in letters:
        return wanted.upper()
    by_text = [letter for letter, text in choices.items() if _plain(text) == _plain(label)]
    if label and len(by_text) == 1:
        return by_text[0]
    raise BadLabel(f"the right answer {wanted!r} is none of the letters {', '.join(letters)} and the text of no choice")


def _chosen_text(said: str, choices: Mapping[str, str]) -> str | None:
    """The one choice whose text is in the reply; a text within another choice's that is there too does not count."""
    spoken = f" {_plain(said)} "
    named = {letter: _plain(text) for letter, text in choices.items() if f" {_plain(text)} " in spoken and _plain(text)}
    longest = [
        letter
        for letter, text in named.items()
        if not any(text != other and f" {text} " in f" {other} " for other in named.values())
    ]
    return longest[0] if len(longest) == 1 else None


def _plain(text: str) -> str:
    said = re.sub(r"\\(?:text|math)[a-z]*\b", " ", text.lower())
    return " ".join(re.sub(r"[^\w.+-]+|(?<!\d)\.|\.(?!\d)", " ", said).split())
