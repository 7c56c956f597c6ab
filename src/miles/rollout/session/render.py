"""The interface between a session and a chat template: render a prompt, render what follows a reply, parse a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from miles.core.media import Images
from miles.core.types import Tokens
from miles.rollout.serving.messages import Message, Tool
from miles.rollout.serving.output_parser import ParsedOutput, ParseText
from miles.rollout.session.families import ChatFamily


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """A conversation up to a reply, and the tokens sampled for that reply."""

    messages: Sequence[Message]
    sampled: Tokens

    @property
    def reply(self) -> Message:
        return self.messages[-1]


class RenderedChat(NamedTuple):
    """Tokens of messages, and the images among them."""

    tokens: list[int]
    images: Images = ()


class ChatRenderer(Protocol):
    """How a family renders conversations. ``turn_only_kwargs``: template arguments of the coming turn alone."""

    @property
    def family(self) -> ChatFamily: ...
    @property
    def turn_only_kwargs(self) -> frozenset[str]: ...

    async def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with their images in the media store, processed off the event loop; SessionError at a bad one."""
        ...

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> RenderedChat:
        """A conversation as the template renders it, with the assistant's turn opened."""
        ...

    def render_continuation(
        self, before: ConversationState, new: Sequence[Message], tools: Sequence[Tool], **template: Any
    ) -> RenderedChat:
        """What follows the sampled tokens: the end of that turn if it is missing, ``new``, the next turn opened."""
        ...

    def render_conversation(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        """A conversation as the template renders it, with no turn opened; for comparison."""
        ...

    def parse_reply(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> ParsedOutput:
        """Split what was sampled after ``context`` (its last tokens suffice); never raises."""
        ...

    def build_partial_parser(self, context: Sequence[int], tools: Sequence[Tool]) -> ParseText:
        """A parser for a reply that is still streaming after ``context``: what it returns only grows."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, with special tokens."""
        ...

    def boundary_tokens(self) -> frozenset[int]:
        """The tokens that frame turns."""
        ...
