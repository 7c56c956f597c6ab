"""Instructions about kinds of words (names, verbs, syllables, Japanese) and about quotes, theses, lists in a text."""

from __future__ import annotations

import re
from itertools import pairwise

from miles.rollout.reward.instructions.pieces import lines, sentences, words
from miles.rollout.reward.instructions.settings import Settings, whole
from miles.rollout.reward.instructions.syllables import syllables
from miles.rollout.reward.instructions.verbs import is_verb
from miles.rollout.reward.score import BadLabel

_NAMES = frozenset(
    words(
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


def person_names(reply: str, settings: Settings) -> bool:
    """At least ``N`` different ones of the fifty first names that the instruction lists."""
    return len(_NAMES & set(re.findall(r"\w+", reply))) >= whole(settings, "N")


def japanese_words(reply: str, settings: Settings) -> bool:
    """Every word number ``N``, 2 ``N``, ... is Japanese, numbers aside; there is at least one."""
    every = whole(settings, "N")
    if every < 1:
        raise BadLabel(f"an instruction asks for every {every}th word; N must be at least 1")
    chosen = [word for word in reply.split()[every - 1 :: every] if re.search(r"[^\W\d]", word)]
    return bool(chosen) and all(_JAPANESE.search(word) for word in chosen)


def starts_with_verb(reply: str, settings: Settings) -> bool:
    """A verb first."""
    said = words(reply)
    return bool(said) and is_verb(said[0])


def odd_and_even_syllables(reply: str, settings: Settings) -> bool:
    """Words with an odd and with an even number of syllables in turn, as far as spelling tells."""
    said = [word for word in words(reply) if word[0].isalpha()]
    return len(said) > 1 and all(syllables(a) % 2 != syllables(b) % 2 for a, b in pairwise(said))


def explained_quotes(reply: str, settings: Settings) -> bool:
    """Words outside quotes after every phrase in double quotes, of which there is one at least."""
    parts = re.split('["“”]', reply)
    after = parts[2::2]
    return len(parts) > 2 and len(parts) % 2 == 1 and all(words(part) for part in after)


def thesis(reply: str, settings: Settings) -> bool:
    """Each section begins with a statement in HTML's italics and goes on in plain text; headings part sections."""
    sections = [section for section in _HEADING.split(reply) if section.strip()]
    if _HEADING.search(reply) and not _HEADING.match(reply.lstrip()) and len(sections) > 1:
        sections = sections[1:]  # what stands before the first heading is no section
    return bool(sections) and all(map(_has_thesis, sections))


def sentences_then_bullets(reply: str, settings: Settings) -> bool:
    """At least two sentences that end in a period, and then at least two bullets with * one after the other."""
    said = lines(reply)
    bullets = [bool(re.match(r"\s*\*(?!\*)", line)) for line in said]
    if True not in bullets:
        return False
    first = bullets.index(True)
    before = sentences("\n".join(said[:first]))
    return sum(sentence.endswith(".") for sentence in before) >= 2 and bullets[first : first + 2] == [True, True]


def _has_thesis(section: str) -> bool:
    found = _THESIS.fullmatch(section)
    return found is not None and bool(words(found[2])) and bool(words(re.sub(r"<[^<>]*>", "", found[3])))
