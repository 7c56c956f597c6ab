"""Counts attempts lost in a row to something other than the policy, so that a run does not go on for nothing."""

from __future__ import annotations

from miles.core.errors import PlugError
from miles.core.types import Prompt


class Failures:
    """``what`` failed is named in the sentence raised (PlugError) at the last of ``most`` failures in a row."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._in_a_row = 0

    def count(self, prompt: Prompt, failure: str | None) -> None:
        """Of an attempt at ``prompt``; ``failure`` is None where there was none."""
        self._in_a_row = 0 if failure is None else self._in_a_row + 1
        if failure is not None and self._in_a_row >= self._most:
            raise PlugError(
                f"{self._what} failed in {self._in_a_row} attempts in a row, the last at prompt {prompt.id} "
                f"({failure}); mend it, or allow more with --max-unscored-attempts."
            )
