"""Instructions about how much there is: words, sentences, paragraphs, numbers."""

from __future__ import annotations

import re

from miles.rollout.reward.ifeval.common import (
    Settings,
    compare_count,
    get_int,
    get_text,
    split_paragraphs,
    split_sentences,
    split_words,
)

_NUMBER = re.compile(r"(?<![\w.,])\d+(?:,\d{3})*(?:\.\d+)?(?![\w])")
_CONJUNCTIONS = frozenset(("for", "and", "nor", "but", "or", "yet", "so"))
_PRONOUNS = frozenset(
    split_words(
        "i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself "
        "we us our ours ourselves they them their theirs themselves"
    )
)
_STOP_WORDS = _PRONOUNS | frozenset(
    split_words(
        "what which who whom this that these those am is are was were be been being have has had having do "
        "does did doing a an the and but if or because as until while of at by for with about against between "
        "into through during before after above below to from up down in out on off over under again further "
        "then once here there when where why how all any both each few more most other some such no nor not "
        "only own same so than too very s t can will just don should now"
    )
)
_MARKS = (".", ",", "!", "?", ";", ":")


def number_words(reply: str, settings: Settings) -> bool:
    """(``relation``) ``num_words`` words."""
    return compare_count(len(split_words(reply)), settings, "num_words", "relation")


def number_sentences(reply: str, settings: Settings) -> bool:
    """(``relation``) ``num_sentences`` sentences."""
    return compare_count(len(split_sentences(reply)), settings, "num_sentences", "relation")


def number_paragraphs(reply: str, settings: Settings) -> bool:
    """``num_paragraphs`` paragraphs, parted by a line of three stars."""
    parts = re.split(r"\s?\*\*\*\s?", reply)
    inner = parts[1:-1] if len(parts) > 2 else []
    if any(not part.strip() for part in inner):
        return False
    return sum(bool(part.strip()) for part in parts) == get_int(settings, "num_paragraphs")


def nth_paragraph_first_word(reply: str, settings: Settings) -> bool:
    """``num_paragraphs`` paragraphs, parted by blank lines; number ``nth_paragraph`` starts with ``first_word``."""
    found, place = split_paragraphs(reply), get_int(settings, "nth_paragraph")
    if len(found) != get_int(settings, "num_paragraphs") or not 1 <= place <= len(found):
        return False
    said = split_words(found[place - 1])
    return bool(said) and said[0].lower() == get_text(settings, "first_word").lower()


def word_count_range(reply: str, settings: Settings) -> bool:
    """From ``min_words`` to ``max_words`` words."""
    return get_int(settings, "min_words") <= len(split_words(reply)) <= get_int(settings, "max_words")


def unique_word_count(reply: str, settings: Settings) -> bool:
    """At least ``N`` different words."""
    return len(set(split_words(reply.lower()))) >= get_int(settings, "N")


def numbers(reply: str, settings: Settings) -> bool:
    """Exactly ``N`` numbers in digits."""
    return len(_NUMBER.findall(reply)) == get_int(settings, "N")


def conjunctions(reply: str, settings: Settings) -> bool:
    """At least ``small_n`` different coordinating conjunctions."""
    return len(_CONJUNCTIONS & set(split_words(reply.lower()))) >= get_int(settings, "small_n")


def pronouns(reply: str, settings: Settings) -> bool:
    """At least ``N`` personal pronouns."""
    return sum(word in _PRONOUNS for word in split_words(reply.lower())) >= get_int(settings, "N")


def punctuation(reply: str, settings: Settings) -> bool:
    """Every common punctuation mark at least once, and an interrobang."""
    return all(mark in reply for mark in _MARKS) and any(mark in reply for mark in ("!?", "?!", "‽"))


def stop_words(reply: str, settings: Settings) -> bool:
    """At most ``percentage`` percent of the words are stop words."""
    said = split_words(reply.lower())
    return bool(said) and 100 * sum(word in _STOP_WORDS for word in said) <= get_int(settings, "percentage") * len(said)


def overlap(reply: str, settings: Settings) -> bool:
    """The share of the reply's trigrams of words that ``reference_text`` has is ``percentage``, two more or less."""
    mine, theirs = _trigrams(reply), _trigrams(get_text(settings, "reference_text"))
    return bool(mine) and abs(100 * len(mine & theirs) / len(mine) - get_int(settings, "percentage")) <= 2


def sentence_type(reply: str, settings: Settings) -> bool:
    """Twice as many statements as questions."""
    ends = [_kind(sentence) for sentence in split_sentences(reply)]
    return ends.count("?") > 0 and ends.count(".") == 2 * ends.count("?")


def sentence_balance(reply: str, settings: Settings) -> bool:
    """As many statements as questions as exclamations."""
    ends = [_kind(sentence) for sentence in split_sentences(reply)]
    return bool(ends) and ends.count(".") == ends.count("?") == ends.count("!")


def _kind(sentence: str) -> str:
    return next((mark for mark in reversed(sentence) if mark in ".?!"), ".")


def _trigrams(reply: str) -> set[tuple[str, ...]]:
    said = split_words(reply.lower())
    return set(zip(said, said[1:], said[2:], strict=False))
