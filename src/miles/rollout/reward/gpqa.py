"""Multiple-choice grader (GPQA): the letter or choice text a response settles on, against the correct one."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from typing import Any

from miles.rollout.reward.text import extract_boxed
from miles.rollout.reward.types import BadLabel, Metadata

_DEFAULT_LETTERS = string.ascii_uppercase[:10]
_LETTER = r"[\"'(\[*_$]*(?:\\(?:text|textbf|mathrm|mathbf)\{)?\(?([A-Z])(?![A-Za-z'’])[\"')\]}*_$.]*"
_STATED = re.compile(
    r"\b(?:answer|option|choice)\b[\s*_]*(?:is|are|:|=|-|–|—|would be|should be|must be)?[\s*_:]*(?:option|choice)?\s*"
    + _LETTER,
    re.IGNORECASE,
)
_CORRECT = re.compile(rf"{_LETTER}\s+is\s+(?:the\s+)?(?:correct|right|best)\b")
_CONCLUDED = re.compile(
    rf"\b(?:thus|therefore|hence|so|consequently|finally|choose|pick|select)\b[\s,:]*(?:it\s+is\s+|it's\s+)?{_LETTER}\s*$",
    re.IGNORECASE,
)
_ALONE = re.compile(rf"\s*{_LETTER}\s*")
_LEADING = re.compile(r"\s*[*_]*\(?([A-Z])[).:][*_]*\s+\S")
_PARENTHESISED = re.compile(r"\(([A-Z])\)")
_ANOTHER = re.compile(r"\s*(?:or|and|,|/|&)\s*[(*\"']*([A-Z])(?![A-Za-z'’])")


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """1 when the response, after its thinking, settles on the correct letter, or names only the correct choice's text.

    The correct one is ``metadata["correct_letter"]``, or the label: a letter, a choice's text, or its index from 0.
    ``metadata["choices"]`` is a list of texts or a mapping from letters to texts; ``metadata["valid_letters"]``
    lists the letters when there are no choices (default A to J).
    """
    choices = _choices(metadata)
    letters = _letters(metadata, choices)
    right = _correct_letter(label.strip(), metadata, choices, letters)
    final_text = reply.rpartition("</think>")[2]
    letter = extract_choice(final_text, letters)
    if letter is None and choices:
        letter = _match_choice_text(extract_boxed(final_text) or final_text, choices)
    return float(letter == right)


def extract_choice(text: str, letters: str) -> str | None:
    r"""The letter a text settles on: in its last box, after its last "answer is", alone on its last line, and so on.

    >>> extract_choice("Not (A). The answer is **B**.", "ABCD"), extract_choice("A or B", "ABCD")
    ('B', None)
    """
    box = extract_boxed(text)
    if box is not None:
        alone = _ALONE.fullmatch(box.replace(r"\ ", " ")) or _LEADING.match(box)
        return _unambiguous(alone, box, letters)
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    for pattern, where in ((_STATED, text), (_CORRECT, text), (_CONCLUDED, last)):
        found = [match for match in pattern.finditer(where) if match[1].isupper() and match[1] in letters]
        if found:
            return _unambiguous(found[-1], where, letters)
    alone = _ALONE.fullmatch(last) or _LEADING.match(last)
    if alone is not None:
        return _unambiguous(alone, last, letters)
    if len(lines) > 1 and (first := _ALONE.fullmatch(lines[0])) is not None:
        return _unambiguous(first, lines[0], letters)
    shown = [match for match in _PARENTHESISED.finditer(last) if match[1] in letters]
    return _unambiguous(shown[-1], last, letters) if shown else None


def _unambiguous(match: re.Match[str] | None, text: str, letters: str) -> str | None:
    """The letter, unless the text continues with another one: two answers are none."""
    if match is None or match[1] not in letters:
        return None
    another = _ANOTHER.match(text, match.end())
    return None if another is not None and another[1] in letters and another[1] != match[1] else match[1]


def _choices(metadata: Metadata) -> Mapping[str, str]:
    raw_choices: Any = metadata.get("choices")
    if raw_choices is None:
        return {}
    if isinstance(raw_choices, Mapping):
        return {str(letter).strip().upper(): str(text) for letter, text in raw_choices.items()}
    if isinstance(raw_choices, str) or len(raw_choices) > len(string.ascii_uppercase):
        raise BadLabel("metadata['choices'] must be a list of texts, or a mapping from letters to texts")
    return dict(zip(string.ascii_uppercase, map(str, raw_choices), strict=False))


def _letters(metadata: Metadata, choices: Mapping[str, str]) -> str:
    raw_choices = metadata.get("valid_letters")
    return (
        "".join(str(letter).strip().upper() for letter in raw_choices)
        if raw_choices
        else "".join(choices) or _DEFAULT_LETTERS
    )


def _correct_letter(label: str, metadata: Metadata, choices: Mapping[str, str], letters: str) -> str:
    stated = metadata.get("correct_letter")
    expected = (stated.strip() if isinstance(stated, str) else label).strip("()[]. ")
    if len(expected) == 1 and expected.upper() in letters:
        return expected.upper()
    by_text = [letter for letter, text in choices.items() if _normalize(text) == _normalize(label)]
    if label and len(by_text) == 1:
        return by_text[0]
    if not isinstance(stated, str) and label.isdecimal() and int(label) < len(letters):
        return letters[int(label)]
    raise BadLabel(
        f"the right answer {expected!r} is none of the letters {', '.join(letters)}, the text of no choice and the "
        "index of none"
    )


def _match_choice_text(final_text: str, choices: Mapping[str, str]) -> str | None:
    """The one choice whose text is in the response; one inside another matching choice does not count."""
    padded = f" {_normalize(final_text)} "
    matching = {
        letter: _normalize(text)
        for letter, text in choices.items()
        if f" {_normalize(text)} " in padded and _normalize(text)
    }
    longest = [
        letter
        for letter, text in matching.items()
        if not any(text != other and f" {text} " in f" {other} " for other in matching.values())
    ]
    return longest[0] if len(longest) == 1 else None


def _normalize(text: str) -> str:
    final_text = re.sub(r"\\(?:text|math)[a-z]*\b", " ", text.lower())
    return " ".join(re.sub(r"[^\w.+-]+|(?<!\d)\.|\.(?!\d)", " ", final_text).split())
