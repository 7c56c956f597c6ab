"""Training branches from a session's tree: every sampled token is trained on exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from miles.core.token_fields import SAMPLING_FIELDS
from miles.core.types import Author, Span, Trajectory
from miles.rollout.session.tree import ConversationPath
from miles.rollout.span_extras import fill_span_extras


class SamplePicker(Protocol):
    """Which of a session's conversations become branches, and in which order; each ends in a reply."""

    def __call__(self, conversations: Sequence[ConversationPath]) -> Sequence[ConversationPath]: ...


class TrajectoryPostProcess(Protocol):
    """Return the trajectory of an agent to train on: with fewer trained tokens, another reward or more metadata."""

    def __call__(self, trajectory: Trajectory) -> Trajectory: ...


def build_branches(conversations: Sequence[ConversationPath]) -> tuple[tuple[Span, ...], ...]:
    """A branch for each conversation with replies that no earlier one has; what it shares with those is its context.

    Where there is no reply at all, the first conversation as it is.
    """
    branches: list[tuple[Span, ...]] = []
    trained: set[int] = set()
    for conversation in conversations:
        own = {node.number for node in conversation.replies if node.spans} - trained
        if own:
            branches.append(tuple(_build_spans(conversation, own)))
            trained |= own
    return tuple(branches) or tuple(conversation.spans for conversation in conversations[:1])


def convert_to_context(span: Span) -> Span:
    """The same tokens as context that is not trained on."""
    extras = {name: values for name, values in span.extras.items() if name not in SAMPLING_FIELDS}
    return Span(author=Author.ENV, tokens=span.tokens, extras=extras)


def _build_spans(conversation: ConversationPath, own: set[int]) -> list[Span]:
    spans: list[Span] = []
    for node in conversation.nodes:
        spans = fill_span_extras(spans, node.prompt_extras)
        for span in node.spans:
            is_trained = span.author is not Author.POLICY or node.number in own
            spans.append(span if is_trained else convert_to_context(span))
    return spans
