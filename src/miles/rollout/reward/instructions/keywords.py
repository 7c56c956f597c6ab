"""Instructions about single words and letters: which must be there, how often, and where."""

from __future__ import annotations

import re

from miles.rollout.reward.instructions.pieces import sentences, words
from miles.rollout.reward.instructions.settings import Settings, holds, text, texts, whole
from miles.rollout.reward.score import BadLabel

_OFTEN = (("keyword1", 1), ("keyword2", 2), ("keyword3", 3), ("keyword4", 5), ("keyword5", 7))


def existence(reply: str, settings: Settings) -> bool:
    """Every one of ``keywords`` is there."""
    return all(_count(reply, keyword) for keyword in texts(settings, "keywords"))


def forbidden_words(reply: str, settings: Settings) -> bool:
    """None of ``forbidden_words`` is there as a word."""
    return not any(_count(reply, word) for word in texts(settings, "forbidden_words"))


def frequency(reply: str, settings: Settings) -> bool:
    """``keyword`` is there (``relation``) ``frequency`` times."""
    return holds(_count(reply, text(settings, "keyword")), settings, "frequency", "relation")


def letter_frequency(reply: str, settings: Settings) -> bool:
    """``letter``, of either case, is there (``let_relation``) ``let_frequency`` times."""
    letter = text(settings, "letter").lower()
    if len(letter) != 1:
        raise BadLabel(f"an instruction counts one letter, not {letter!r}")
    return holds(reply.lower().count(letter), settings, "let_frequency", "let_relation")


def keywords_multiple(reply: str, settings: Settings) -> bool:
    """``keyword1`` once, ``keyword2`` twice, ``keyword3`` three, ``keyword4`` five and ``keyword5`` seven times."""
    given = [(settings[key], times) for key, times in _OFTEN if settings.get(key)]
    if not given:
        raise BadLabel("an instruction needs a text in keyword1")
    return all(_count(reply, keyword) == times for keyword, times in given)


def in_sentence(reply: str, settings: Settings) -> bool:
    """``word`` is in sentence number ``N``."""
    found, number = sentences(reply), whole(settings, "N")
    return 1 <= number <= len(found) and _count(found[number - 1], text(settings, "word")) > 0


def specific_position(reply: str, settings: Settings) -> bool:
    """Word number ``m`` of sentence number ``n`` is ``keyword``."""
    found, number, place = sentences(reply), whole(settings, "n"), whole(settings, "m")
    if not 1 <= number <= len(found):
        return False
    said = words(found[number - 1])
    return 1 <= place <= len(said) and said[place - 1].lower() == text(settings, "keyword").lower()


def second_and_second_to_last(reply: str, settings: Settings) -> bool:
    """The second word, and the last but one, are ``keyword``."""
    said, keyword = words(reply.lower()), text(settings, "keyword").lower()
    return len(said) > 1 and said[1] == said[-2] == keyword


def _count(reply: str, keyword: str) -> int:
    """How often a keyword stands by itself, in whatever case."""
    return len(re.findall(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", reply, re.IGNORECASE))
