"""The history of a session: an append-only tree of what the policy was given and what it answered.

    opening (PROMPT) -- reply (POLICY) -- more (ENV) -- reply -- ...
       |                   `-- another more -- reply                an edit, a branch
       `-- another reply                                            a retry
    another opening -- reply                                        a sub-agent, a compacted context

A node is never changed; a conversation is the path from an opening down to a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.core.types import EMPTY, Array, Author, Span, Tokens
from miles.rollout.session.message import Message, Tool, canonical_json

CUT = ("length", "abort")
"""Why a reply may have ended before the model ended it; such a reply cannot be followed by anything."""


@dataclass(frozen=True, slots=True)
class Words:
    """What a question is written with besides its messages. ``passing`` are words about the coming turn alone."""

    tools: tuple[Tool, ...] = ()
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    passing: frozenset[str] = frozenset()

    @property
    def words(self) -> str:
        return canonical_json(self.template)

    @property
    def frame(self) -> str:
        return canonical_json([self.tools, {k: v for k, v in self.template.items() if k not in self.passing}])


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Messages and their tokens. A reply has one message, the policy's spans, and the ``reason`` it ended.

    ``given`` is what the engine found out of the last tokens before a reply, where no reply before it had told.
    A question keeps the ``tools`` and the words to the ``template`` it was written with; ``frame`` and ``words`` are
    what of these must be equal for another to go on behind it, or to use its tokens again.
    """

    number: int
    parent: int | None
    messages: tuple[Message, ...]
    spans: tuple[Span, ...]
    reason: str | None = None
    given: Mapping[str, Array] = field(default_factory=lambda: EMPTY)
    tools: tuple[Tool, ...] = ()
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    frame: str = ""
    words: str = ""

    @property
    def is_reply(self) -> bool:
        return self.reason is not None

    @property
    def is_cut(self) -> bool:
        """Is it a reply that the model did not end itself?"""
        return self.reason in CUT


@dataclass(frozen=True, slots=True)
class Path:
    """A conversation: the nodes from an opening down."""

    nodes: tuple[Node, ...]

    @property
    def number(self) -> int:
        """The node it ends in."""
        return self.nodes[-1].number

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(message for node in self.nodes for message in node.messages)

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(span for node in self.nodes for span in node.spans)

    @property
    def tokens(self) -> Tokens:
        return np.concatenate([span.tokens for span in self.spans] or [np.zeros(0, np.int32)])

    @property
    def replies(self) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.is_reply)

    @property
    def reason(self) -> str | None:
        """Why its last reply ended; None where it ends with a question."""
        return self.nodes[-1].reason


class Tree:
    """Nodes by number, in the order they came; nothing is ever taken out."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._children: list[list[int]] = []
        self._roots: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: int) -> Node:
        return self._nodes[number]

    @property
    def roots(self) -> Sequence[Node]:
        return [self._nodes[number] for number in self._roots]

    def children(self, number: int) -> Sequence[Node]:
        return [self._nodes[child] for child in self._children[number]]

    def ask(self, parent: int | None, messages: Sequence[Message], tokens: Sequence[int], written: Words) -> Node:
        """A question behind reply ``parent``; without one, the opening of a conversation."""
        assert parent is None or self._nodes[parent].is_reply, "a question stands behind a reply"
        author = Author.PROMPT if parent is None else Author.ENV
        span = Span(author=author, tokens=np.array(tokens, np.int32))
        return self._add(
            Node(
                number=len(self),
                parent=parent,
                messages=tuple(messages),
                spans=(span,),
                tools=written.tools,
                template=written.template,
                frame=written.frame,
                words=written.words,
            )
        )

    def answer(
        self,
        parent: int,
        message: Message,
        spans: Sequence[Span],
        reason: str,
        given: Mapping[str, Array] = EMPTY,
    ) -> Node:
        """A reply to question ``parent``: the engine's own spans, and what it found out of all tokens before them."""
        assert not self._nodes[parent].is_reply, "a reply stands behind a question"
        assert all(span.author is Author.POLICY for span in spans), "the policy wrote the reply"
        kept = tuple(span for span in spans if len(span))
        # A reply's last token is computed when the next one is drawn; all before it have been told already.
        new = sum(map(len, self._nodes[parent].spans)) + (self._nodes[parent].parent is not None)
        told = {name: values[-new:].copy() for name, values in given.items()} if new else {}
        node = Node(number=len(self), parent=parent, messages=(message,), spans=kept, reason=reason, given=told)
        return self._add(node)

    def path(self, number: int) -> Path:
        """The conversation that ends in this node."""
        nodes: list[Node] = []
        at: int | None = number
        while at is not None:
            nodes.append(self._nodes[at])
            at = nodes[-1].parent
        return Path(tuple(reversed(nodes)))

    def leaves(self) -> list[Path]:
        """The conversations, in the order their last replies came; questions nobody answered are no end."""
        return [self.path(node.number) for node in self._nodes if node.is_reply and not self._goes_on(node.number)]

    def _goes_on(self, number: int) -> bool:
        return any(self._children[child] for child in self._children[number])

    def _add(self, node: Node) -> Node:
        self._nodes.append(node)
        self._children.append([])
        (self._roots if node.parent is None else self._children[node.parent]).append(node.number)
        return node
