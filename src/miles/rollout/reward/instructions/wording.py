"""Instructions about which words follow which: letters, lengths, repeats, and how sentences link up."""

from __future__ import annotations

import re
from collections import Counter
from itertools import groupby, pairwise

from miles.rollout.reward.instructions.pieces import paragraphs, sentences, words
from miles.rollout.reward.instructions.settings import Settings, whole

_CLUSTER = re.compile(r"[b-df-hj-np-tv-xz]{2}", re.IGNORECASE)
_SHORTEST_PALINDROME, _PALINDROMES = 5, 10


def alphabet(reply: str, settings: Settings) -> bool:
    """Each word starts with the letter after the one before, z being followed by a."""
    first = [ord(word[0]) - ord("a") for word in words(reply.lower())]
    return bool(first) and all(0 <= a < 26 and b == (a + 1) % 26 for a, b in pairwise((*first, (first[-1] + 1) % 26)))


def vowels(reply: str, settings: Settings) -> bool:
    """One paragraph that has at most three of the five vowels."""
    return len(reply.strip().splitlines()) == 1 and len(set(reply.lower()) & set("aeiou")) <= 3


def consonants(reply: str, settings: Settings) -> bool:
    """Every word has two consonants in a row."""
    said = words(reply)
    return bool(said) and all(_CLUSTER.search(word) for word in said)


def palindromes(reply: str, settings: Settings) -> bool:
    """At least ten palindromes of five letters or more."""
    said = words(reply.lower())
    return sum(len(word) >= _SHORTEST_PALINDROME and word == word[::-1] for word in said) >= _PALINDROMES


def prime_lengths(reply: str, settings: Settings) -> bool:
    """Every word has a prime number of letters."""
    said = words(reply)
    return bool(said) and all(_is_prime(len(word)) for word in said)


def repeats(reply: str, settings: Settings) -> bool:
    """No word more than ``small_n`` times."""
    return max(Counter(words(reply.lower())).values(), default=0) <= whole(settings, "small_n")


def no_consecutive(reply: str, settings: Settings) -> bool:
    """No two words in a row start with the same letter."""
    said = words(reply.lower())
    return bool(said) and all(a[0] != b[0] for a, b in pairwise(said))


def last_first(reply: str, settings: Settings) -> bool:
    """Each sentence starts with the word the one before ended with."""
    said = [words(sentence.lower()) for sentence in sentences(reply)]
    return bool(said) and all(a[-1] == b[0] for a, b in pairwise(said))


def paragraph_last_first(reply: str, settings: Settings) -> bool:
    """Each paragraph ends with the word it starts with."""
    said = [words(paragraph.lower()) for paragraph in paragraphs(reply)]
    return bool(said) and all(bool(each) and each[0] == each[-1] for each in said)


def increment(reply: str, settings: Settings) -> bool:
    """Each sentence has ``small_n`` words more than the one before."""
    counts = [len(words(sentence)) for sentence in sentences(reply)]
    return bool(counts) and all(b - a == whole(settings, "small_n") for a, b in pairwise(counts))


def alliteration_increment(reply: str, settings: Settings) -> bool:
    """Each sentence has a longer run of words with one first letter than the sentence before."""
    runs = [_longest_run(words(sentence.lower())) for sentence in sentences(reply)]
    return bool(runs) and all(a < b for a, b in pairwise(runs))


def sentence_words(reply: str, settings: Settings) -> bool:
    """Three sentences of equal length in characters that share no word."""
    found = sentences(reply)
    said = [word for sentence in found for word in words(sentence.lower())]
    return len(found) == 3 and len({len(sentence) for sentence in found}) == 1 and len(said) == len(set(said))


def _longest_run(said: list[str]) -> int:
    return max((len(list(run)) for _, run in groupby(said, key=lambda word: word[0])), default=0)


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))
