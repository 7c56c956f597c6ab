"""The door between a session and a chat template: the first question in tokens, and what stands behind a reply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles.core.types import Tokens
from miles.rollout.session.families.family import Family
from miles.rollout.session.message import Message, Tool
from miles.rollout.session.speech import Parts


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What stands before new messages: a conversation up to a reply, and the tokens sampled for that reply."""

    messages: Sequence[Message]
    sampled: Tokens

    @property
    def reply(self) -> Message:
        return self.messages[-1]


Reading = Callable[[str], Parts]
"""A text as far as it has come -> its parts, each the beginning of what ``Renderer.parts`` makes of the whole."""


class Renderer(Protocol):
    """A family's way of writing conversations. ``passing`` are words to the template about the coming turn alone."""

    @property
    def family(self) -> Family: ...
    @property
    def passing(self) -> frozenset[str]: ...

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        """A whole conversation, as the template writes it, with the assistant's turn opened."""
        ...

    def following(self, before: Before, new: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        """What goes behind the sampled tokens: the end of that turn if it is missing, ``new``, the next turn opened."""
        ...

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        """A whole conversation, as the template writes it, with nothing opened; for those who compare."""
        ...

    def parts(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> Parts:
        """What was sampled behind ``context`` (the end of it will do), taken apart; never raises."""
        ...

    def growing(self, context: Sequence[int], tools: Sequence[Tool]) -> Reading:
        """How a text is taken apart that is still coming behind ``context``: what it says is not taken back."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Tokens in words, every mark written out."""
        ...

    def boundaries(self) -> frozenset[int]:
        """The tokens that frame turns."""
        ...
