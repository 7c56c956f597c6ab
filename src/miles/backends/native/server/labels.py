"""What versions of the weights are called on the wire: SGLang's ``weight_version`` is a word, ours is a number."""

from __future__ import annotations

from miles.core.types import Version


class Labels:
    """The word of each version that was given one; another is its number."""

    def __init__(self, first: str = "default") -> None:
        self._words: dict[Version, str] = {}
        self._first = first

    def of(self, version: Version | None) -> str:
        """How a version is called."""
        if version is None:
            return self._first
        return self._words.get(version, self._first if version.number == 0 else str(version.number))

    def put(self, version: Version, word: str) -> None:
        self._words[version] = word
