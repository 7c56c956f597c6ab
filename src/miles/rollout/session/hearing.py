"""A reply while it is being drawn: what is certain of it, in parts, never half a character and nothing of a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles.core.spelling import Spell, Spelling, certain
from miles.rollout.session.render import Reading
from miles.rollout.session.speech import Parts


class Hearing:
    """Tokens in as they come, parts out; each part is the beginning of the finished reply's, and only grows."""

    def __init__(self, spell: Spell, read: Reading, stop: Sequence[str] = ()) -> None:
        self._spelling = Spelling(spell, (), stop)  # a reply is spelled by itself, not behind its context
        self._read = read
        self._stop = tuple(stop)

    def add(self, tokens: Sequence[int]) -> None:
        self._spelling.add(tokens)

    def parts(self) -> Parts:
        """What may be told now. A stop string ends the reply, and may lie across what parts are told by."""
        parts = self._read(before(self._spelling.text(), self._stop))
        thought, said = before(parts.reasoning, self._stop), before(parts.content, self._stop)
        # Thoughts have ended where words begin, and so has what might have become a stop in them.
        return replace(
            parts, reasoning=thought if said else certain(thought, self._stop), content=certain(said, self._stop)
        )


def before(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of the ``stop`` strings in it; all of it where there is none."""
    return text[: min((at for at in map(text.find, stop) if at >= 0), default=len(text))]
