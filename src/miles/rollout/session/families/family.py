"""What is to be known of a family, besides its chat template, to write behind tokens that were sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from miles.rollout.session.calls import Tools
from miles.rollout.session.speech import Parts

Difference = Literal["boundary", "whitespace", "tool_calls", "retokenised", "thinking", "unknown"]
"""How stored tokens may differ from what the template would write of the same conversation (see ``audit``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """``signs``: all of them, in what a template writes, tell the family.

    ``closes`` are the marks that end the assistant's turn; when none was sampled, the one its template puts there is.
    Where a turn is ended by the ``heads`` of the next, ``closes`` is empty and a head that was sampled is not written
    again.
    ``stops`` are other marks a model may end with. ``differs`` names the ways in which its template rewrites a
    conversation as it grows, which stored tokens never do. ``adapt`` puts messages as its template wants them, and
    ``speech`` takes a turn apart where marks for thoughts and calls do not tell enough. For the audit, ``inner`` are
    marks within turns that a template may leave out, ``thoughts`` and ``wording`` patterns of what it may leave out of
    thoughts and put otherwise around calls.
    """

    name: str
    signs: tuple[str, ...]
    closes: tuple[str, ...]
    heads: tuple[str, ...]
    stops: tuple[str, ...] = ()
    calls: str | None = None
    thinking: bool = False
    passing: frozenset[str] = frozenset()
    arguments_as_text: bool = False
    differs: tuple[Difference, ...] = ()
    speech: Callable[[str, Tools, bool], Parts] | None = None
    adapt: Callable[[list[dict[str, Any]]], list[dict[str, Any]]] | None = None
    inner: tuple[str, ...] = ()
    wording: str = ""
    thoughts: str = r"<think>.*?(?:</think>|$)"

    @property
    def marks(self) -> tuple[str, ...]:
        """Every mark that frames turns."""
        return tuple(dict.fromkeys((*self.closes, *self.heads, *self.stops)))
