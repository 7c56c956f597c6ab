"""The nouns of a turn, whichever API asks for it: what is asked, how it may be drawn, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import Completion
from miles.core.types import EMPTY, Tokens
from miles.rollout.session.message import Message, Tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a request says of how its reply is drawn; None is nothing.

    ``unforced`` names what it asks for that only a constrained or bent distribution could give.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    limit: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    seed: int | None = None
    unforced: tuple[str, ...] = ()


def _nothing() -> Mapping[str, Any]:
    return EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One turn that is asked for. ``calls``: may the reply call tools; ``template``: words for the chat template."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    wish: Wish = Wish()
    model: str = "default"
    calls: bool = True
    stream: bool = False
    usage: bool = False
    logprobs: bool = False
    token_ids: bool = False
    template: Mapping[str, Any] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of a reply; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """What is known of a turn when it begins: what its reply will be called and dated, and what the engine reads."""

    id: str
    created: int
    context: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Told(Opened):
    """A finished turn, in the parts every API tells: ``finish`` is ``stop``, ``length`` or ``tool_calls``.

    ``matched`` is the request's own stop string that ended it, if one did. ``words`` are its tokens one by one, where
    they were asked for. ``unused`` names what the request said of drawing that this session does not go by.
    """

    content: str
    reasoning: str
    calls: tuple[Call, ...]
    finish: str
    matched: str | None
    completion: Completion
    words: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """What the policy wrote."""
        return [int(token) for span in self.completion.spans for token in span.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [float(x) for span in self.completion.spans if span.logprobs is not None for x in span.logprobs]

    @property
    def usage(self) -> tuple[int, int, int]:
        """Tokens read, written, and, of those read, found computed."""
        written = sum(len(span) for span in self.completion.spans)
        return len(self.context), written, self.completion.cached_tokens
