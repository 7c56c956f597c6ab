"""Conversation tree of a session: an append-only tree of questions and replies.

    first question (PROMPT) -- reply (POLICY) -- question (ENV) -- reply -- ...
       |                          `-- another question -- reply             an edit, a branch
       `-- another reply                                                    a retry
    another first question -- reply                                         a sub-agent, a compacted context

A node is never changed; a conversation is the path from a root down to a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from miles.core.media import Images, join_images
from miles.core.types import EMPTY, Array, Author, Span, Tokens
from miles.rollout.serving.messages import Message, Tool, dump_canonical_json

TRUNCATED_REASONS = ("length", "abort")
"""Finish reasons of a reply that the model did not end itself; nothing can follow such a reply."""


@dataclass(frozen=True, slots=True)
class TemplateArgs:
    """What a question is rendered with besides its messages; ``turn_only`` names the arguments of one turn alone."""

    tools: tuple[Tool, ...] = ()
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    turn_only: frozenset[str] = frozenset()

    @property
    def key(self) -> str:
        """Equal for questions whose tokens can be reused."""
        return dump_canonical_json(self.template)

    @property
    def frame(self) -> str:
        """Equal for questions of one conversation."""
        lasting = {name: value for name, value in self.template.items() if name not in self.turn_only}
        return dump_canonical_json([self.tools, lasting])


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationNode:
    """Messages and their tokens. A reply has one message, the policy's spans and a ``finish_reason``.

    ``prompt_extras`` are the engine's per-token arrays for the last tokens before a reply that no earlier reply covers.
    A question stores the ``tools`` and ``template`` arguments it was rendered with; ``frame`` must be equal for another
    question to follow it, ``key`` for its tokens to be reused.
    """

    number: int
    parent: int | None
    messages: tuple[Message, ...]
    spans: tuple[Span, ...]
    finish_reason: str | None = None
    prompt_extras: Mapping[str, Array] = field(default_factory=lambda: EMPTY)
    tools: tuple[Tool, ...] = ()
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    frame: str = ""
    key: str = ""

    @property
    def is_reply(self) -> bool:
        return self.finish_reason is not None

    @property
    def is_truncated(self) -> bool:
        """Whether this is a reply that the model did not end itself."""
        return self.finish_reason in TRUNCATED_REASONS


@dataclass(frozen=True, slots=True)
class ConversationPath:
    """A conversation: the nodes from a root down."""

    nodes: tuple[ConversationNode, ...]

    @property
    def number(self) -> int:
        """The number of its last node."""
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
    def images(self) -> Images:
        return join_images((len(span), span.images) for span in self.spans)

    @property
    def replies(self) -> tuple[ConversationNode, ...]:
        return tuple(node for node in self.nodes if node.is_reply)

    @property
    def finish_reason(self) -> str | None:
        """Why its last reply ended; None where it ends with a question."""
        return self.nodes[-1].finish_reason


class ConversationTree:
    """Nodes by number, in the order they were added; nothing is ever removed."""

    def __init__(self) -> None:
        self._nodes: list[ConversationNode] = []
        self._children: list[list[int]] = []
        self._roots: list[int] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __getitem__(self, number: int) -> ConversationNode:
        return self._nodes[number]

    @property
    def roots(self) -> Sequence[ConversationNode]:
        return [self._nodes[number] for number in self._roots]

    def get_children(self, number: int) -> Sequence[ConversationNode]:
        return [self._nodes[child] for child in self._children[number]]

    def add_question(
        self,
        parent: int | None,
        messages: Sequence[Message],
        tokens: Sequence[int],
        args: TemplateArgs,
        images: Images = (),
    ) -> ConversationNode:
        """A question after reply ``parent``; without one, the root of a conversation."""
        assert parent is None or self._nodes[parent].is_reply, "a question follows a reply"
        author = Author.PROMPT if parent is None else Author.ENV
        return self._add(
            ConversationNode(
                number=len(self),
                parent=parent,
                messages=tuple(messages),
                spans=(Span(author=author, tokens=np.array(tokens, np.int32), images=images),),
                tools=args.tools,
                template=args.template,
                frame=args.frame,
                key=args.key,
            )
        )

    def add_reply(
        self,
        parent: int,
        message: Message,
        spans: Sequence[Span],
        finish_reason: str,
        prompt_extras: Mapping[str, Array] = EMPTY,
    ) -> ConversationNode:
        """A reply to question ``parent``: the engine's own spans, and its per-token arrays for all tokens before."""
        question = self._nodes[parent]
        assert not question.is_reply, "a reply follows a question"
        assert all(span.author is Author.POLICY for span in spans), "the policy wrote the reply"
        # The last token of a reply is computed when the next token is sampled; earlier ones are covered already.
        new = sum(map(len, question.spans)) + (question.parent is not None)
        extras = {name: values[-new:].copy() for name, values in prompt_extras.items()} if new else {}
        return self._add(
            ConversationNode(
                number=len(self),
                parent=parent,
                messages=(message,),
                spans=tuple(span for span in spans if len(span)),
                finish_reason=finish_reason,
                prompt_extras=extras,
            )
        )

    def get_conversation(self, number: int) -> ConversationPath:
        """The conversation that ends in this node."""
        nodes: list[ConversationNode] = []
        current: int | None = number
        while current is not None:
            nodes.append(self._nodes[current])
            current = nodes[-1].parent
        return ConversationPath(tuple(reversed(nodes)))

    def leaves(self) -> list[ConversationPath]:
        """The conversations, in the order of their last replies; an unanswered question does not end one."""
        return [
            self.get_conversation(node.number)
            for node in self._nodes
            if node.is_reply and not any(self._children[child] for child in self._children[node.number])
        ]

    def _add(self, node: ConversationNode) -> ConversationNode:
        self._nodes.append(node)
        self._children.append([])
        (self._roots if node.parent is None else self._children[node.parent]).append(node.number)
        return node
