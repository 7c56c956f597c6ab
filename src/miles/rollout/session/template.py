"""Chat-template renderer: renders only what is new of a conversation, after tokens that were sampled.

New messages are rendered after a scaffold, a question and an answer that contain a placeholder word, and cut there:

    template of  question, answer(PLACEHOLDER), new messages      ... <start> PLACEHOLDER <end> \\n <start> new ...
                                                                                 ^ cut after the answer's end
                                                                  sampled ... <end> | \\n <start> new ... <start>

So it never matters how the template would rewrite the earlier turns. The marker at the cut is a token by itself, and no
text is tokenized across it: both sides have the same tokens in one piece and in two.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from miles.core.errors import MilesError, UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.images import encode_chat, prepare_messages
from miles.rollout.serving.errors import SessionError
from miles.rollout.serving.messages import (
    Message,
    Tool,
    extract_media,
    extract_text,
    get_function,
    get_parts,
    get_tool_calls,
    get_tool_schemas,
)
from miles.rollout.serving.output_parser import (
    OutputParser,
    ParsedOutput,
    ParseText,
    strip_end_markers,
    strip_partial_end_markers,
)
from miles.rollout.serving.tool_parsers import THINK, TOOL_CALL_PARSERS, ToolCallParser
from miles.rollout.session.families import ChatFamily
from miles.rollout.session.render import ConversationState, RenderedChat

PLACEHOLDER = "Zwischenruf"
TOOLS_NOT_RENDERED = (
    "The chat template does not render the tools that are offered; describe them in the system message."
)
_TAIL_TOKENS = 16
"""Tokens at the end of a context in which the marker that starts reasoning is looked for."""


class ChatTemplate:
    """A tokenizer's chat template, called with messages in the form templates expect.

    ``defaults`` are template arguments passed every time.
    """

    def __init__(self, tokenizer: Tokenizer, family: ChatFamily, defaults: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._defaults = dict(defaults)
        self._renders_calls = True
        self._renders_calls = PLACEHOLDER in self._probe_call()
        self._checked_tools = False

    def _probe_call(self) -> str:
        """What the template renders of a message that only calls a tool."""
        try:
            return self.render(build_scaffold(None, [{"role": "tool"}]), (), open_turn=False)
        except MilesError:
            return PLACEHOLDER  # it raises again when there is a call

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> str:
        """A conversation with the next turn opened. Warns once where the template leaves the tools out."""
        text = self.render(messages, tools, open_turn=True, **template)
        if tools and not self._checked_tools:
            self._checked_tools = True
            if text == self.render(messages, (), open_turn=True, **template):
                warnings.warn(TOOLS_NOT_RENDERED, stacklevel=2)
        return text

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], *, open_turn: bool, **template: Any) -> str:
        """What the template renders; ``open_turn``: with the beginning of the assistant's next turn."""
        arguments = {**self._defaults, **template, "add_generation_prompt": open_turn}
        if tools:
            arguments["tools"] = [dict(tool) for tool in tools]
        prepared = [self._prepare_message(message) for message in messages]
        if self._family.adapt_messages is not None:
            prepared = self._family.adapt_messages(prepared)
        try:
            return self._tokenizer.render_chat_text(prepared, **arguments)
        except MilesError:
            raise
        except Exception as error:  # a template is a program of the model's author and may fail in any way
            raise SessionError(f"The chat template cannot render this conversation: {error}.") from error

    def _prepare_message(self, message: Message) -> dict[str, Any]:
        # Templates test whether a field is present, so an empty one must be absent.
        prepared = {name: value for name, value in message.items() if value is not None and value != []}
        if not get_parts(message) or not list(extract_media([message])):
            prepared["content"] = extract_text(message)
        if calls := get_tool_calls(message):
            prepared["tool_calls"] = [self._prepare_call(call) for call in calls]
            if not self._renders_calls:
                texts = [*filter(None, [extract_text(message)]), *map(_render_call, prepared.pop("tool_calls"))]
                prepared["content"] = "\n".join(texts)
        return prepared

    def _prepare_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = get_function(call)
        arguments = function.get("arguments") or {}
        if self._family.arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        id = {"id": call["id"]} if call.get("id") else {}
        return {**id, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _render_call(call: Mapping[str, Any]) -> str:
    """A call in the most common format, for templates that render none."""
    function = call["function"]
    value = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def build_scaffold(before: ConversationState | None, new: Sequence[Message]) -> list[dict[str, Any]]:
    """A question and an answer for ``new`` to follow; with a call where a result follows or the real answer has one."""
    calls = () if before is None else get_tool_calls(before.reply)
    answer: dict[str, Any] = {"role": "assistant", "content": PLACEHOLDER}
    if calls or new[0].get("role") == "tool":
        name = get_function(calls[0]).get("name") if calls else new[0].get("name") or "tool"
        id = (calls[0].get("id") if calls else None) or new[0].get("tool_call_id") or "call_0"
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": {"word": PLACEHOLDER}}}
        answer |= {"content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "?"}, answer]


class TemplateRenderer:
    """A ChatRenderer for a known family; rejects (UsageError) a tokenizer that lacks the family's markers."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: ChatFamily,
        *,
        tool_parser: ToolCallParser | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.family = family
        default = None if family.tool_parser is None else TOOL_CALL_PARSERS[family.tool_parser]
        self._tool_parser = tool_parser or default
        self._template = ChatTemplate(tokenizer, family, template or {})
        encoded = {marker: tokenizer.encode(marker) for marker in family.frame_markers}
        self._ids = {marker: tokens[0] for marker, tokens in encoded.items() if len(tokens) == 1}
        needed = family.end_markers[:1] or family.role_markers[:1]
        missing = [marker for marker in needed if marker not in self._ids]
        if missing:
            raise UsageError(
                f"The tokenizer has no token {missing[0]}, which ends a turn of the family {family.name}; name another "
                "family for the session, or none."
            )
        self._end_ids = frozenset(self._ids[marker] for marker in family.end_markers if marker in self._ids)

    @property
    def turn_only_kwargs(self) -> frozenset[str]:
        return self.family.turn_only_kwargs

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def boundary_tokens(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    async def prepare(self, messages: Sequence[Message]) -> list[Message]:
        return await prepare_messages(self._tokenizer, messages)

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> RenderedChat:
        return self._encode(self._template.render_prompt(messages, tools, **template), messages)

    def render_conversation(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._encode(self._template.render(messages, tools, open_turn=False, **template), messages).tokens

    def render_continuation(
        self, before: ConversationState, new: Sequence[Message], tools: Sequence[Tool], **template: Any
    ) -> RenderedChat:
        scaffold = build_scaffold(before, new)
        text = self._template.render([*scaffold, *new], tools, open_turn=True, **template)
        last = int(before.sampled[-1]) if len(before.sampled) else None
        markers = self.family.end_markers or self.family.role_markers
        answer = text.find(PLACEHOLDER)
        ends = [(position, marker) for marker in markers if (position := text.find(marker, answer)) >= 0]
        if answer < 0 or not ends:
            raise SessionError(
                f"The chat template does not render turns as the family {self.family.name} does, so nothing can follow "
                "one; name another family for the session, or none."
            )
        position, marker = min(ends)
        rendered = self._encode(text[position:], new)
        if not self.family.end_markers:  # the next role marker ends the turn: not written again if it was sampled
            return _drop_first(rendered) if rendered.tokens[0] == last else rendered
        assert rendered.tokens[0] == self._ids[marker], "an end marker is a token by itself"
        return _drop_first(rendered) if last in self._end_ids else rendered

    def _encode(self, text: str, messages: Sequence[Message]) -> RenderedChat:
        return RenderedChat(*encode_chat(self._tokenizer, text, messages))

    def parse_reply(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> ParsedOutput:
        return self._build_parser(context, tools, complete=True)(self._tokenizer.decode(sampled))

    def build_partial_parser(self, context: Sequence[int], tools: Sequence[Tool]) -> ParseText:
        parse = self._build_parser(context, tools, complete=False)
        return lambda text: parse(strip_partial_end_markers(text, self.family.frame_markers))

    def _build_parser(self, context: Sequence[int], tools: Sequence[Tool], *, complete: bool) -> ParseText:
        schemas, parse_turn = get_tool_schemas(tools), self.family.parse_turn
        if parse_turn is not None:
            return lambda text: parse_turn(text, schemas, complete)
        tail = self._tokenizer.decode(context[-_TAIL_TOKENS:]).rstrip()
        parser = OutputParser(
            tool_parser=self._tool_parser,
            tools=schemas,
            reasoning_parser=THINK if self.family.reasoning else None,
            in_reasoning=tail.endswith(THINK.start),
        )
        # Where the prompt has closed the reasoning, the line break before the answer is not part of the answer.
        blank = "\n" if self.family.reasoning and tail.endswith(THINK.end) else ""
        return lambda text: parser.parse(
            strip_end_markers(text, self.family.frame_markers).lstrip(blank), complete=complete
        )


def _drop_first(rendered: RenderedChat) -> RenderedChat:
    """Without the first token, which was sampled already."""
    return RenderedChat(rendered.tokens[1:], tuple(placed.shift(-1) for placed in rendered.images))
