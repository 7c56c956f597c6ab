"""Words to spell backward, as reasoning_gym makes them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from miles.rollout.data.procedural import generate_entries

ASK = "Spell this word backward (example: sun -> nus): "
_ENTRIES = 800


def words(seed: int, *, but: Sequence[str]) -> list[str]:
    """Words of four small letters, each once, and none that holds one of ``but``, forward or backward."""
    known = [word for word in _made(seed) if word.isascii() and word.isalpha() and word.islower()]
    return [word for word in known if not any(part in word or part in word[::-1] for part in but)]


def spelled(word: str, seed: int = 0) -> dict[str, Any]:
    """The entry that asks for it, as a row of data: the scorer is found by what stands in its metadata."""
    entry = _made(seed)[word]
    return {"input": entry["question"], "label": entry["answer"], "metadata": entry["metadata"]}


@cache
def _made(seed: int) -> dict[str, dict[str, Any]]:
    path = f"reasoning_gym:spell_backward?size={_ENTRIES}&seed={seed}&min_word_len=4&max_word_len=4"
    return {entry["metadata"]["word"]: entry for entry in generate_entries(path, range(_ENTRIES))}
