"""Fallback renderer for chat templates of no known family: best effort, checked at every turn.

What is new is the difference between two renderings, with the new messages and without. The shorter must be a prefix of
the longer, in text and in tokens, for the conversation itself and for a scaffold; otherwise the turn is rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.protocols import Tokenizer
from miles.rollout.images import encode_chat, prepare_messages
from miles.rollout.serving.errors import SessionError
from miles.rollout.serving.messages import Message, Tool, get_tool_schemas
from miles.rollout.serving.output_parser import OutputParser, ParsedOutput, ParseText, strip_partial_end_markers
from miles.rollout.serving.tool_parsers import THINK, ToolCallParser
from miles.rollout.session.families import ChatFamily
from miles.rollout.session.render import ConversationState, RenderedChat
from miles.rollout.session.template import PLACEHOLDER, ChatTemplate, build_scaffold

UNKNOWN_FAMILY = ChatFamily(name="unknown", template_signs=(), end_markers=(), role_markers=(), reasoning=True)
WARNING = (
    "No renderer is registered for this model's chat template: what follows a reply is found by comparing two "
    "renderings, and a conversation that the template rewrites is rejected. Name a family for the session if it has "
    "one."
)


class FallbackRenderer:
    """A ChatRenderer from nothing but a template. ``end_tokens`` end a turn, where they are known."""

    family = UNKNOWN_FAMILY
    turn_only_kwargs: frozenset[str] = frozenset()

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        tool_parser: ToolCallParser | None = None,
        end_tokens: Sequence[int] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._tool_parser = tool_parser
        self._end_tokens = frozenset(end_tokens)
        self._template = ChatTemplate(tokenizer, UNKNOWN_FAMILY, template or {})

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def boundary_tokens(self) -> frozenset[int]:
        return self._end_tokens

    async def prepare(self, messages: Sequence[Message]) -> list[Message]:
        return await prepare_messages(self._tokenizer, messages)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> RenderedChat:
        return self._encode(self._template.render_prompt(messages, tools, **template), messages)

    def render_conversation(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._encode(self._template.render(messages, tools, open_turn=False, **template), messages).tokens

    def render_continuation(
        self, before: ConversationState, new: Sequence[Message], tools: Sequence[Tool], **template: Any
    ) -> RenderedChat:
        self._render_both(before.messages, new, tools, template)
        scaffold = build_scaffold(before, new)
        shorter, longer = self._render_both(scaffold, new, tools, template)
        position = shorter.rfind(PLACEHOLDER)
        if position < 0:
            raise _template_error("it does not render what the assistant said")
        # The end of the answer: what follows the placeholder, without what a call is wrapped in.
        end = shorter[position + len(PLACEHOLDER) :]
        if scaffold[-1].get("tool_calls"):
            end = self._render_turn_end(tools, template)
        closing = self._missing_end(self._tokenizer.encode(end), before)
        rendered = self._encode(longer[len(shorter) :], new)
        return RenderedChat(
            [*closing, *rendered.tokens], tuple(placed.shift(len(closing)) for placed in rendered.images)
        )

    def _encode(self, text: str, messages: Sequence[Message]) -> RenderedChat:
        return RenderedChat(*encode_chat(self._tokenizer, text, messages))

    def parse_reply(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> ParsedOutput:
        tokens, closing = list(sampled), self._closing_tokens()
        while tokens and tokens[-1] in closing:
            tokens.pop()
        return self._build_parser(context, tools).parse(self._tokenizer.decode(tokens))

    def build_partial_parser(self, context: Sequence[int], tools: Sequence[Tool]) -> ParseText:
        parser = self._build_parser(context, tools)
        markers = tuple(filter(None, (self._tokenizer.decode([token]) for token in self._closing_tokens())))
        return lambda text: parser.parse(strip_partial_end_markers(text, markers), complete=False)

    def _build_parser(self, context: Sequence[int], tools: Sequence[Tool]) -> OutputParser:
        return OutputParser(
            tool_parser=self._tool_parser,
            tools=get_tool_schemas(tools),
            reasoning_parser=THINK,
            in_reasoning=self._tokenizer.decode(context[-16:]).rstrip().endswith(THINK.start),
        )

    def _closing_tokens(self) -> frozenset[int]:
        """Tokens that end a turn and are not part of its text."""
        return self._end_tokens | frozenset(self._tokenizer.encode(self._render_turn_end((), {}))[:1])

    def _render_turn_end(self, tools: Sequence[Tool], template: Mapping[str, Any]) -> str:
        """What the template renders after an answer without calls."""
        plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PLACEHOLDER}]
        return self._template.render(plain, tools, open_turn=False, **template).rpartition(PLACEHOLDER)[2]

    def _missing_end(self, closing: Sequence[int], before: ConversationState) -> list[int]:
        """The tokens that end a turn, without those that were sampled already."""
        sampled = before.sampled.tolist()
        for length in range(len(closing), 0, -1):
            if sampled[-length:] == list(closing[:length]):
                return list(closing[length:])
        if sampled and sampled[-1] in self._end_tokens:
            return list(closing[1:])
        return list(closing)

    def _render_both(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], template: Mapping[str, Any]
    ) -> tuple[str, str]:
        shorter = self._template.render(messages, tools, open_turn=False, **template)
        longer = self._template.render([*messages, *new], tools, open_turn=True, **template)
        if not longer.startswith(shorter):
            raise _template_error("it rewrites earlier turns when a message is added")
        encode = self._tokenizer.encode
        if encode(shorter) + encode(longer[len(shorter) :]) != encode(longer):
            raise _template_error("one of its turns ends within a token")
        return shorter, longer


def _template_error(reason: str) -> SessionError:
    return SessionError(
        f"The chat template of this model is of no known family, and a reply cannot be continued: {reason}; name a "
        "family for the session, or use a template that only appends."
    )
