"""The types of a turn, whichever API asks for it: the request, the header of its reply, and the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import Completion
from miles.core.types import EMPTY, Tokens
from miles.rollout.serving.messages import Message, Tool, format_tool_call
from miles.rollout.serving.sampling_params import SamplingFields
from miles.rollout.serving.tool_parsers import ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """One requested turn. ``sampling`` are the sampling fields of its body; ``max_new_tokens`` its own limit.

    ``constraints`` names fields that only a constrained or biased distribution could honour. ``allow_tool_calls``: the
    reply may call tools; ``template``: arguments of the chat template.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    sampling: SamplingFields = field(default_factory=SamplingFields)
    max_new_tokens: int | None = None
    seed: int | None = None
    constraints: tuple[str, ...] = ()
    model: str = "default"
    allow_tool_calls: bool = True
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    return_token_ids: bool = False
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnHeader:
    """What is known when a turn begins: the id and date of its reply, and the context the engine reads."""

    id: str
    created: int
    context: Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult(TurnHeader):
    """A finished turn. ``finish_reason`` is ``stop``, ``length`` or ``tool_calls``.

    ``matched_stop`` is the request's own stop string that ended it, if one did. ``token_texts`` is the text of each
    token, where log-probs were requested. ``ignored`` names sampling fields that the session does not follow.
    """

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    matched_stop: str | None
    completion: Completion
    token_texts: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [int(token) for span in self.completion.spans for token in span.tokens]

    @property
    def logprobs(self) -> list[float]:
        return [float(x) for span in self.completion.spans if span.logprobs is not None for x in span.logprobs]

    @property
    def usage(self) -> tuple[int, int, int]:
        """Prompt tokens, completion tokens, and the prompt tokens found in the prefix cache."""
        num_completion = sum(len(span) for span in self.completion.spans)
        return len(self.context), num_completion, self.completion.cached_tokens

    @property
    def message(self) -> Message:
        """The reply as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [format_tool_call(call.id, call.name, call.arguments) for call in self.tool_calls]
        return message
