"""Instruction checks on words and letters: keywords, their counts and positions, and patterns of consecutive words."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby, pairwise

from miles.rollout.reward.ifeval.common import (
    Settings,
    compare_count,
    get_int,
    get_text,
    get_texts,
    split_paragraphs,
    split_sentences,
    split_words,
)
from miles.rollout.reward.types import BadLabel

_OFTEN = (("keyword1", 1), ("keyword2", 2), ("keyword3", 3), ("keyword4", 5), ("keyword5", 7))
_CLUSTER = re.compile(r"[b-df-hj-np-tv-xz]{2}", re.IGNORECASE)
_SHORTEST_PALINDROME, _PALINDROMES = 5, 10


def existence(reply: str, settings: Settings) -> bool:
    """Every one of ``keywords`` is there."""
    return all(_count(reply, keyword) for keyword in get_texts(settings, "keywords"))


def forbidden_words(reply: str, settings: Settings) -> bool:
    """None of ``forbidden_words`` is there as a word."""
    return not any(_count(reply, word) for word in get_texts(settings, "forbidden_words"))


def frequency(reply: str, settings: Settings) -> bool:
    """``keyword`` is there (``relation``) ``frequency`` times."""
    return compare_count(_count(reply, get_text(settings, "keyword")), settings, "frequency", "relation")


def letter_frequency(reply: str, settings: Settings) -> bool:
    """``letter``, of either case, is there (``let_relation``) ``let_frequency`` times."""
    letter = get_text(settings, "letter").lower()
    if len(letter) != 1:
        raise BadLabel(f"an instruction counts one letter, not {letter!r}")
    return compare_count(reply.lower().count(letter), settings, "let_frequency", "let_relation")


def keywords_multiple(reply: str, settings: Settings) -> bool:
    """``keyword1`` once, ``keyword2`` twice, ``keyword3`` three, ``keyword4`` five and ``keyword5`` seven times."""
    given = [(settings[key], times) for key, times in _OFTEN if settings.get(key)]
    if not given:
        raise BadLabel("an instruction needs a text in keyword1")
    return all(_count(reply, keyword) == times for keyword, times in given)


def in_sentence(reply: str, settings: Settings) -> bool:
    """``word`` is in sentence number ``N``."""
    found, number = split_sentences(reply), get_int(settings, "N")
    return 1 <= number <= len(found) and _count(found[number - 1], get_text(settings, "word")) > 0


def specific_position(reply: str, settings: Settings) -> bool:
    """Word number ``m`` of sentence number ``n`` is ``keyword``."""
    found = split_sentences(reply)
    number = get_int(settings, "n")
    place = get_int(settings, "m")
    if not 1 <= number <= len(found):
        return False
    said = split_words(found[number - 1])
    return 1 <= place <= len(said) and said[place - 1].lower() == get_text(settings, "keyword").lower()


def second_and_second_to_last(reply: str, settings: Settings) -> bool:
    """The second word, and the last but one, are ``keyword``."""
    said, keyword = split_words(reply.lower()), get_text(settings, "keyword").lower()
    return len(said) > 1 and said[1] == said[-2] == keyword


def _count(reply: str, keyword: str) -> int:
    """How often a keyword stands by itself, in whatever case."""
    return len(re.findall(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", reply, re.IGNORECASE))


def alphabet(reply: str, settings: Settings) -> bool:
    """Each word starts with the letter after the one before, z being followed by a."""
    first = [ord(word[0]) - ord("a") for word in split_words(reply.lower())]
    return bool(first) and all(0 <= a < 26 and b == (a + 1) % 26 for a, b in pairwise((*first, (first[-1] + 1) % 26)))


def vowels(reply: str, settings: Settings) -> bool:
    """One paragraph that has at most three of the five vowels."""
    return len(reply.strip().splitlines()) == 1 and len(set(reply.lower()) & set("aeiou")) <= 3


def consonants(reply: str, settings: Settings) -> bool:
    """Every word has two consonants in a row."""
    said = split_words(reply)
    return bool(said) and all(_CLUSTER.search(word) for word in said)


def palindromes(reply: str, settings: Settings) -> bool:
    """At least ten palindromes of five letters or more."""
    said = split_words(reply.lower())
    return sum(len(word) >= _SHORTEST_PALINDROME and word == word[::-1] for word in said) >= _PALINDROMES


def prime_lengths(reply: str, settings: Settings) -> bool:
    """Every word has a prime number of letters."""
    said = split_words(reply)
    return bool(said) and all(_is_prime(len(word)) for word in said)


def repeats(reply: str, settings: Settings) -> bool:
    """No word more than ``small_n`` times."""
    return max(Counter(split_words(reply.lower())).values(), default=0) <= get_int(settings, "small_n")


def no_consecutive(reply: str, settings: Settings) -> bool:
    """No two words in a row start with the same letter."""
    said = split_words(reply.lower())
    return bool(said) and all(a[0] != b[0] for a, b in pairwise(said))


def last_first(reply: str, settings: Settings) -> bool:
    """Each sentence starts with the word the one before ended with."""
    said = [split_words(sentence.lower()) for sentence in split_sentences(reply)]
    return bool(said) and all(a[-1] == b[0] for a, b in pairwise(said))


def paragraph_last_first(reply: str, settings: Settings) -> bool:
    """Each paragraph ends with the word it starts with."""
    said = [split_words(paragraph.lower()) for paragraph in split_paragraphs(reply)]
    return bool(said) and all(bool(each) and each[0] == each[-1] for each in said)


def increment(reply: str, settings: Settings) -> bool:
    """Each sentence has ``small_n`` words more than the one before."""
    counts = [len(split_words(sentence)) for sentence in split_sentences(reply)]
    return bool(counts) and all(b - a == get_int(settings, "small_n") for a, b in pairwise(counts))


def alliteration_increment(reply: str, settings: Settings) -> bool:
    """Each sentence has a longer run of words with one first letter than the sentence before."""
    runs = [_longest_run(split_words(sentence.lower())) for sentence in split_sentences(reply)]
    return bool(runs) and all(a < b for a, b in pairwise(runs))


def sentence_words(reply: str, settings: Settings) -> bool:
    """Three sentences of equal length in characters that share no word."""
    found = split_sentences(reply)
    said = [word for sentence in found for word in split_words(sentence.lower())]
    return len(found) == 3 and len({len(sentence) for sentence in found}) == 1 and len(said) == len(set(said))


def _longest_run(said: list[str]) -> int:
    return max((len(list(run)) for _, run in groupby(said, key=lambda word: word[0])), default=0)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
