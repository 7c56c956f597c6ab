"""From a session's tree to the branches of a trajectory: every sampled token is trained on exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles.core.extras import TEACHER_LOGPROB, TEACHER_LOGPROBS, TEACHER_TOKENS, TOP_TOKENS
from miles.core.types import Author, Span
from miles.rollout.given import stamped
from miles.rollout.session.tree import Path

_OF_DRAWING = (TOP_TOKENS, TEACHER_LOGPROB, TEACHER_TOKENS, TEACHER_LOGPROBS)
"""Extras that say how a token was drawn, which is of no use where it is only read; how it was routed is."""


class Pick(Protocol):
    """Which of a session's conversations are made into branches, and in which order; each ends in a reply."""

    def __call__(self, conversations: Sequence[Path]) -> Sequence[Path]: ...


def branches_of(paths: Sequence[Path]) -> tuple[tuple[Span, ...], ...]:
    """A branch for each conversation that has replies no earlier one has; what it shares with those is its context.

    Where nobody answered anything, the first conversation as it is.
    """
    branches: list[tuple[Span, ...]] = []
    trained: set[int] = set()
    for path in paths:
        own = {node.number for node in path.replies if node.spans} - trained
        if own:
            branches.append(tuple(_spans(path, own)))
            trained |= own
    return tuple(branches) or tuple(path.spans for path in paths[:1])


def as_context(span: Span) -> Span:
    """The same tokens, to be read and not trained on."""
    extras = {name: values for name, values in span.extras.items() if name not in _OF_DRAWING}
    return Span(author=Author.ENV, tokens=span.tokens, extras=extras)


def _spans(path: Path, own: set[int]) -> list[Span]:
    out: list[Span] = []
    for node in path.nodes:
        out = stamped(out, node.given)
        out += (s if s.author is not Author.POLICY or node.number in own else as_context(s) for s in node.spans)
    return out
