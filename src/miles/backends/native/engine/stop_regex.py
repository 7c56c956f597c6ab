"""Stop patterns: regular expressions from clients, matched by RE2 in time linear in the text.

Python's ``re`` backtracks: one pattern can keep the engine's thread, and the GIL, for ever.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Protocol

from miles.core.errors import EngineError

MAX_PATTERN_LENGTH = 4096


class StopPattern(Protocol):
    """A compiled pattern: its source, and the first match in a text, or None."""

    @property
    def pattern(self) -> str: ...

    def search(self, text: str, /) -> Any: ...


@lru_cache(maxsize=256)
def compile_stop_pattern(pattern: str) -> StopPattern:
    """Return a compiled pattern; raise ``EngineError`` if it is none, or too large."""
    try:
        import re2
    except ImportError as error:
        raise EngineError("stop_regex needs google-re2: pip install 'miles-rl[serve]'") from error
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise EngineError(f"stop_regex has {len(pattern)} characters, but the limit is {MAX_PATTERN_LENGTH}")
    options = re2.Options()
    options.log_errors = False
    try:
        return re2.compile(pattern, options=options)
    except (re2.error, UnicodeEncodeError) as error:
        reason = error.args[0] if error.args else error
        text = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(error)
        raise EngineError(f"stop_regex {pattern!r} is not a regular expression of RE2: {text}") from error
