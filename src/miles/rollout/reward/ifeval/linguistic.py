"""Linguistic instruction checks: language, names, verbs, syllables, Japanese words, quotes, theses.

Languages are detected with langdetect and syllables counted with syllapy, as the published scorers do.
"""

from __future__ import annotations

import os
import re
from functools import cache
from itertools import pairwise

import langdetect
import syllapy

from miles.rollout.reward.ifeval.common import Settings, get_int, get_text, split_lines, split_sentences, split_words
from miles.rollout.reward.ifeval.verbs import is_verb
from miles.rollout.reward.types import BadLabel

_NAMES = frozenset(
    split_words(
        "Emma Liam Sophia Jackson Olivia Noah Ava Lucas Isabella Mason Mia Ethan Charlotte Alexander Amelia Benjamin "
        "Harper Leo Zoe Daniel Chloe Samuel Lily Matthew Grace Owen Abigail Gabriel Ella Jacob Scarlett Nathan "
        "Victoria Elijah Layla Nicholas Audrey David Hannah Christopher Penelope Thomas Nora Andrew Aria Joseph Claire "
        "Ryan Stella Jonathan"
    )
)
_JAPANESE = re.compile(r"[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]")
_THESIS = re.compile(r"\s*<(i|em)>\s*(\S.*?)</\1>\s*(.*)", re.DOTALL | re.IGNORECASE)
_HEADING = re.compile(
    r"^[ \t]*(?:#{1,6}[ \t].*|<h[1-6]\b.*|\*\*[^*\n]+\*\*:?[ \t]*|section[ \t]+\S+.{0,60})$", re.I | re.M
)


def response_language(reply: str, settings: Settings) -> bool:
    """The whole reply is in ``language``, a two-letter code."""
    code = get_text(settings, "language").strip().lower().partition("-")[0]
    if code not in _known_languages():
        known = ", ".join(sorted(_known_languages()))
        raise BadLabel(f"an instruction asks for the language {code}, and the known ones are {known}")
    return detect_language(reply) == code


def detect_language(reply: str) -> str | None:
    """The two-letter code of the most likely language, or None where a text has no words.

    >>> detect_language("Der Hund ist nicht im Haus."), detect_language("42")
    ('de', None)
    """
    langdetect.DetectorFactory.seed = 0  # its sampling is random otherwise
    try:
        return langdetect.detect(reply).partition("-")[0]
    except langdetect.LangDetectException:
        return None


@cache
def _known_languages() -> frozenset[str]:
    return frozenset(name.partition("-")[0] for name in os.listdir(langdetect.PROFILES_DIRECTORY))


def person_names(reply: str, settings: Settings) -> bool:
    """At least ``N`` different ones of the fifty first names that the instruction lists."""
    return len(_NAMES & set(re.findall(r"\w+", reply))) >= get_int(settings, "N")


def japanese_words(reply: str, settings: Settings) -> bool:
    """Every word number ``N``, 2 ``N``, ... is Japanese, numbers aside; there is at least one."""
    every = get_int(settings, "N")
    if every < 1:
        raise BadLabel(f"an instruction asks for every {every}th word; N must be at least 1")
    chosen = [word for word in reply.split()[every - 1 :: every] if re.search(r"[^\W\d]", word)]
    return bool(chosen) and all(_JAPANESE.search(word) for word in chosen)


def starts_with_verb(reply: str, settings: Settings) -> bool:
    """A verb first."""
    said = split_words(reply)
    return bool(said) and is_verb(said[0])


def odd_and_even_syllables(reply: str, settings: Settings) -> bool:
    """Words with an odd and an even number of syllables alternate."""
    said = [word for word in split_words(reply) if word[0].isalpha()]
    return len(said) > 1 and all(syllapy.count(a) % 2 != syllapy.count(b) % 2 for a, b in pairwise(said))


def explained_quotes(reply: str, settings: Settings) -> bool:
    """Words outside quotes after every phrase in double quotes, of which there is one at least."""
    parts = re.split('["“”]', reply)
    after = parts[2::2]
    return len(parts) > 2 and len(parts) % 2 == 1 and all(split_words(part) for part in after)


def thesis(reply: str, settings: Settings) -> bool:
    """Each section begins with a statement in HTML's italics and goes on in plain text; headings part sections."""
    sections = [section for section in _HEADING.split(reply) if section.strip()]
    if _HEADING.search(reply) and not _HEADING.match(reply.lstrip()) and len(sections) > 1:
        sections = sections[1:]  # what stands before the first heading is no section
    return bool(sections) and all(map(_has_thesis, sections))


def sentences_then_bullets(reply: str, settings: Settings) -> bool:
    """At least two sentences that end in a period, and then at least two bullets with * one after the other."""
    said = split_lines(reply)
    bullets = [bool(re.match(r"\s*\*(?!\*)", line)) for line in said]
    if True not in bullets:
        return False
    first = bullets.index(True)
    before = split_sentences("\n".join(said[:first]))
    return sum(sentence.endswith(".") for sentence in before) >= 2 and bullets[first : first + 2] == [True, True]


def _has_thesis(section: str) -> bool:
    found = _THESIS.fullmatch(section)
    return found is not None and bool(split_words(found[2])) and bool(split_words(re.sub(r"<[^<>]*>", "", found[3])))
