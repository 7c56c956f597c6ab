"""Output parser: splits a model's text into reasoning, content and tool calls, complete or while it streams.

Nothing here ever raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from miles.core.detokenizer import IncrementalDetokenizer, strip_partial_stop
from miles.rollout.serving.lenient_json import MalformedToolCall
from miles.rollout.serving.messages import ToolSchemas
from miles.rollout.serving.tool_parsers import SECTION_MARKERS, ReasoningParser, ToolCall, ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedOutput:
    """A reply so far; ``notes`` say what was not written as it should be.

    While a reply streams, reasoning, content and tool calls are prefixes of what they will be, and only grow.
    """

    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    notes: tuple[str, ...] = ()


ParseText = Callable[[str], ParsedOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputParser:
    """How a reply is split. ``in_reasoning``: the prompt already ends with the marker that starts the reasoning."""

    tool_parser: ToolCallParser | None = None
    tools: ToolSchemas | None = None
    reasoning_parser: ReasoningParser | None = None
    in_reasoning: bool = False

    def parse(self, text: str, *, complete: bool = True) -> ParsedOutput:
        """Split ``text``; while it is not ``complete``, an end that may become a marker is held back."""
        reasoning, notes = "", []
        if self.reasoning_parser is not None:
            reasoning, text, notes = self._split_reasoning(text, self.reasoning_parser, complete)
        if self.tool_parser is None or not self.tools:  # without offered tools nothing is a call
            return ParsedOutput(reasoning=reasoning, content=text)
        split = _split_complete if complete else _split_partial
        content, tool_calls, more = split(text, self.tool_parser, self.tools)
        return ParsedOutput(reasoning=reasoning, content=content, tool_calls=tuple(tool_calls), notes=(*notes, *more))

    def _split_reasoning(self, text: str, parser: ReasoningParser, complete: bool) -> tuple[str, str, list[str]]:
        stripped = text.lstrip()
        if not self.in_reasoning and not stripped.startswith(parser.start):
            undecided = not complete and parser.start.startswith(stripped)
            return "", "" if undecided else text, []
        reasoning, end, rest = stripped.removeprefix(parser.start).partition(parser.end)
        if end:
            return reasoning.strip(), rest.lstrip(), []
        markers = self.tool_parser.markers if self.tool_parser is not None and self.tools else ()
        position = _find_first(reasoning, markers)
        if not complete:
            reasoning = reasoning if position < 0 else reasoning[:position]
            return strip_partial_stop(reasoning, (parser.end, *markers)).strip(), "", []
        if position >= 0:
            note = "A tool was called before the reasoning was closed."
            return reasoning[:position].strip(), reasoning[position:], [note]
        return reasoning.strip(), "", []


class StreamingParser:
    """Tokens in as they are sampled, parsed output out: each part is a prefix of the finished one and only grows."""

    def __init__(self, decode: Callable[[Sequence[int]], str], parse: ParseText, stop: Sequence[str] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(decode, (), stop)  # a reply is decoded without its context
        self._parse = parse
        self._stop = tuple(stop)

    def add(self, tokens: Sequence[int]) -> None:
        self._detokenizer.add(tokens)

    def parse(self) -> ParsedOutput:
        """What is certain so far. A stop string ends the reply, and may lie across the markers."""
        output = self._parse(truncate_at_stop(self._detokenizer.text(), self._stop))
        reasoning = truncate_at_stop(output.reasoning, self._stop)
        content = truncate_at_stop(output.content, self._stop)
        if not content:  # once content begins, the end of the reasoning cannot become a stop string any more
            reasoning = strip_partial_stop(reasoning, self._stop)
        return replace(output, reasoning=reasoning, content=strip_partial_stop(content, self._stop))


def truncate_at_stop(text: str, stop: Sequence[str]) -> str:
    """``text`` up to the first of the ``stop`` strings in it."""
    position = _find_first(text, stop)
    return text if position < 0 else text[:position]


def strip_end_markers(text: str, markers: Sequence[str]) -> str:
    """A turn's text without the markers that end it."""
    while (marker := next((marker for marker in markers if text.endswith(marker)), None)) is not None:
        text = text.removesuffix(marker)
    return text


def strip_partial_end_markers(text: str, markers: Sequence[str]) -> str:
    """The same for a text that is still streaming: also without the beginning of such a marker."""
    return strip_end_markers(strip_partial_stop(strip_end_markers(text, markers), markers), markers)


def _split_complete(text: str, parser: ToolCallParser, tools: ToolSchemas) -> tuple[str, list[ToolCall], list[str]]:
    """Content, calls and notes of a complete text. A block that cannot be parsed stays in the content."""
    tool_calls: list[ToolCall] = []
    notes: list[str] = []
    content_parts: list[str] = []
    position = 0
    for block in parser.find_blocks(text):
        content_parts.append(text[position : block.start])
        position = block.stop
        try:
            calls = parser.parse_block(block.body, tools)
        except MalformedToolCall as error:
            notes.append(f"A tool call could not be parsed and was left in the text: {error}.")
            content_parts.append(text[block.start : block.stop])
            continue
        tool_calls.extend(calls)
        notes.extend(f"A call of {call.name} was parsed although {call.note}." for call in calls if call.note)
        if not block.closed:
            notes.append(f"A call of {calls[-1].name} was parsed although it was never closed.")
    content_parts.append(text[position:])
    if not tool_calls:
        return text, [], notes
    content = "".join(content_parts)
    for marker in SECTION_MARKERS:
        content = content.replace(marker, "")
    return content.rstrip(), tool_calls, notes


def _split_partial(text: str, parser: ToolCallParser, tools: ToolSchemas) -> tuple[str, list[ToolCall], list[str]]:
    """Of a text that is still streaming: the content before its first call, and the calls that are closed."""
    if parser.bare and text.lstrip().startswith(("{", "[")):  # the whole text may be a call
        return "", [], []
    markers = (*parser.markers, *SECTION_MARKERS)
    position = _find_first(text, markers)
    if position < 0:
        return strip_partial_stop(text, markers).rstrip(), [], []
    tool_calls: list[ToolCall] = []
    for block in parser.find_blocks(text):
        if not block.closed or (parser.open_ended and block.stop == len(text)):
            break
        try:
            tool_calls.extend(parser.parse_block(block.body, tools))
        except MalformedToolCall:
            continue
    return text[:position].rstrip(), tool_calls, []


def _find_first(text: str, markers: Sequence[str]) -> int:
    """The first position of any marker; -1 where there is none."""
    return min((position for marker in markers if (position := text.find(marker)) >= 0), default=-1)
