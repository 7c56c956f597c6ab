"""Chat families: one row for each family of chat templates, with what the template itself does not say.

A family's own chat template renders every message. A row holds which markers frame a turn, which of them the model
samples itself, and how it marks its reasoning and its tool calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from miles.core.detokenizer import strip_partial_stop
from miles.rollout.serving.lenient_json import MalformedToolCall
from miles.rollout.serving.messages import ToolSchemas, extract_text, get_function, get_tool_calls
from miles.rollout.serving.output_parser import ParsedOutput
from miles.rollout.serving.tool_parsers import ToolCall, build_tool_call

MismatchKind = Literal["boundary", "whitespace", "tool_calls", "retokenised", "thinking", "unknown"]
"""How stored tokens may differ from what the template would render of the same conversation (see ``audit``)."""
AdaptMessages = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFamily:
    """``template_signs`` all occur in what a template of this family renders.

    ``end_markers`` end the assistant's turn; when the model sampled none, the template's own is written. Where a turn
    is ended by the ``role_markers`` of the next one, ``end_markers`` is empty, and a role marker that was sampled is
    not written again. ``stop_markers`` are other markers a model may end with.

    ``expected_mismatches`` are the ways in which the template rewrites earlier turns as a conversation grows, which
    stored tokens never do. ``adapt_messages`` prepares messages for the template; ``parse_turn`` replaces the output
    parser (text, tools, complete). ``turn_only_kwargs`` are template arguments that concern the coming turn alone.

    For the audit: ``inner_markers`` may be left out within turns, ``reasoning_pattern`` and ``call_wording`` match what
    a template may leave out of reasoning and reword around calls.
    """

    name: str
    template_signs: tuple[str, ...]
    end_markers: tuple[str, ...]
    role_markers: tuple[str, ...]
    stop_markers: tuple[str, ...] = ()
    tool_parser: str | None = None
    reasoning: bool = False
    turn_only_kwargs: frozenset[str] = frozenset()
    arguments_as_text: bool = False
    expected_mismatches: tuple[MismatchKind, ...] = ()
    parse_turn: Callable[[str, ToolSchemas, bool], ParsedOutput] | None = None
    adapt_messages: AdaptMessages | None = None
    inner_markers: tuple[str, ...] = ()
    call_wording: str = ""
    reasoning_pattern: str = r"<think>.*?(?:</think>|$)"

    @property
    def frame_markers(self) -> tuple[str, ...]:
        """Every marker that frames turns."""
        return tuple(dict.fromkeys((*self.end_markers, *self.role_markers, *self.stop_markers)))


# -- gpt-oss (harmony) ----------------------------------------------------------------------

_MESSAGE = re.compile(r"<\|message\|>(.*?)(?=<\|end\|>|<\|return\|>|<\|call\|>|<\|start\|>|<\|channel\|>|$)", re.DOTALL)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_END_MARKERS = re.compile(r"<\|(?:end|return|call)\|>")
_HARMONY_MARKERS = ("<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")


def parse_harmony_turn(text: str, tools: ToolSchemas, complete: bool) -> ParsedOutput:
    """A turn's messages by channel: analysis is reasoning, commentary holds calls, anything else is content."""
    if "<|message|>" not in text:
        return ParsedOutput(content=_END_MARKERS.sub("", text).strip()) if complete else ParsedOutput()
    reasoning: list[str] = []
    content: list[str] = []
    tool_calls: list[ToolCall] = []
    notes: list[str] = []
    in_final = False
    position = 0
    for match in _MESSAGE.finditer(text):
        head, body = text[position : match.start()], match.group(1)
        position = match.end()
        ended = complete or position < len(text)
        found = _CHANNEL.search(head)
        channel = None if found is None else found.group(1)
        recipient = _RECIPIENT.search(head)
        if recipient is not None and channel != "final":
            if ended:
                _add_harmony_call(recipient.group(1), body, tools, tool_calls, content, notes)
            continue
        in_final = in_final or channel == "final"
        target = reasoning if channel == "analysis" else content
        target.append(body if ended else strip_partial_stop(body, _HARMONY_MARKERS))
    # More reasoning may follow a commentary message, but none follows the final answer: only then is content certain.
    return ParsedOutput(
        reasoning="\n".join(reasoning).strip(),
        content="\n".join(content).strip() if complete or in_final else "",
        tool_calls=tuple(tool_calls),
        notes=tuple(notes),
    )


def _add_harmony_call(
    recipient: str,
    body: str,
    tools: ToolSchemas,
    tool_calls: list[ToolCall],
    content: list[str],
    notes: list[str],
) -> None:
    try:
        call = build_tool_call(recipient.removeprefix("functions."), body, tools)
    except MalformedToolCall as error:
        notes.append(f"A tool call could not be parsed and was left in the text: {error}.")
        content.append(body)
        return
    tool_calls.append(call)
    if call.note:
        notes.append(f"A call of {call.name} was parsed although {call.note}.")


def rename_reasoning_field(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """harmony's template takes reasoning under ``thinking``, and beside a call either reasoning or text."""
    for message in messages:
        if reasoning := message.pop("reasoning_content", None):
            message["thinking"] = reasoning
            if message.get("tool_calls"):
                message["content"] = ""
    return messages


# -- Gemma and DeepSeek ---------------------------------------------------------------------


def fold_tools_into_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows only alternating users and models: results become user turns, calls become JSON."""
    adapted: list[dict[str, Any]] = []
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and adapted and adapted[-1]["role"] == "user":
            adapted[-1]["content"] = f"{extract_text(adapted[-1])}\n{extract_text(message)}"
            continue
        calls = [json.dumps(_bare_call(call), ensure_ascii=False) for call in get_tool_calls(message)]
        fields = {name: value for name, value in message.items() if name not in ("tool_calls", "tool_call_id", "name")}
        if calls:
            fields["content"] = "\n".join([*filter(None, [extract_text(message)]), *calls])
        adapted.append(fields | {"role": "user"} if is_result else fields)
    return adapted


def _bare_call(call: Any) -> dict[str, Any]:
    function = get_function(call)
    return {"name": function.get("name"), "parameters": function.get("arguments")}


def clear_content_beside_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """DeepSeek V3's template renders calls only in a message whose content is None."""
    return [m | {"content": None} if m.get("tool_calls") and not m["content"] else m for m in messages]


# -- the table ------------------------------------------------------------------------------

FAMILIES: tuple[ChatFamily, ...] = (
    # gpt-oss: an answer ends with <|return|> and a call with <|call|>, both sampled; the template writes <|end|> for an
    # earlier answer and leaves out its analysis. A turn is several messages, so <|end|> alone does not end it.
    ChatFamily(
        name="harmony",
        template_signs=("<|start|>user<|message|>",),
        end_markers=("<|end|>", "<|return|>", "<|call|>"),
        role_markers=("<|start|>",),
        reasoning=True,
        expected_mismatches=("boundary", "thinking", "tool_calls"),
        parse_turn=parse_harmony_turn,
        adapt_messages=rename_reasoning_field,
        call_wording=r"<\|channel\|>commentary|<\|constrain\|>|json(?=<\|message\|>)",
        reasoning_pattern=r"(?:assistant)?<\|channel\|>analysis<\|message\|>.*?(?=<\|end\|>|$)",
    ),
    # Kimi K2: calls are numbered through the conversation and results name the number, so the model's ids are kept.
    ChatFamily(
        name="kimi",
        template_signs=("<|im_user|>", "<|im_middle|>"),
        end_markers=("<|im_end|>",),
        role_markers=("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
        stop_markers=("[EOS]",),
        tool_parser="kimi",
        reasoning=True,
        expected_mismatches=("thinking",),
    ),
    # MiniMax M2: the coming turn begins with reasoning; results of several tools stand in one turn.
    ChatFamily(
        name="minimax",
        template_signs=("]~b]user", "[e~["),
        end_markers=("[e~[",),
        role_markers=("]~b]", "]~!b["),
        tool_parser="minimax",
        reasoning=True,
        expected_mismatches=("thinking",),
    ),
    # Llama 3: a turn that calls a built-in tool ends with <|eom_id|>, which the template writes again only where tools
    # are offered. A conversation may hold one call a turn.
    ChatFamily(
        name="llama3",
        template_signs=("<|start_header_id|>user<|end_header_id|>", "<|eot_id|>"),
        end_markers=("<|eot_id|>", "<|eom_id|>"),
        role_markers=("<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>"),
        stop_markers=("<|end_of_text|>",),
        tool_parser="llama3",
        expected_mismatches=("boundary", "whitespace"),
    ),
    # Gemma 2 and 3: the template knows no tools.
    ChatFamily(
        name="gemma",
        template_signs=("<start_of_turn>user", "<end_of_turn>"),
        end_markers=("<end_of_turn>",),
        role_markers=("<start_of_turn>",),
        stop_markers=("<eos>",),
        tool_parser="gemma",
        expected_mismatches=("whitespace",),
        adapt_messages=fold_tools_into_text,
    ),
    # GLM-4.5 and later: a turn has no end marker; the role marker of the next ends it, and the model samples it. If it
    # samples one that the next message's marker does not match, both are kept.
    ChatFamily(
        name="glm",
        template_signs=("[gMASK]", "<|user|>", "<|assistant|>"),
        end_markers=(),
        role_markers=("<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"),
        stop_markers=("<|endoftext|>",),
        tool_parser="glm",
        reasoning=True,
        turn_only_kwargs=frozenset(("enable_thinking",)),
        expected_mismatches=("boundary", "thinking"),
    ),
    # DeepSeek V3, V3.1, R1: after tool results the assistant continues without a role marker. R1's template writes the
    # frame of calls and results in the first round only.
    ChatFamily(
        name="deepseek",
        template_signs=("<｜User｜>", "<｜Assistant｜>"),
        end_markers=("<｜end▁of▁sentence｜>",),
        role_markers=("<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>"),
        inner_markers=(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        tool_parser="deepseek",
        reasoning=True,
        turn_only_kwargs=frozenset(("thinking",)),
        arguments_as_text=True,
        expected_mismatches=("boundary", "whitespace", "thinking"),
        adapt_messages=clear_content_beside_calls,
        reasoning_pattern=r"(?:<think>.*?)?</think>|<think>.*$",
    ),
    # SmolLM3 and SmolLM2: ChatML with a default system message.
    ChatFamily(
        name="smollm3",
        template_signs=("<|im_start|>user", "<|im_end|>", "SmolLM", "<think>"),
        end_markers=("<|im_end|>",),
        role_markers=("<|im_start|>",),
        stop_markers=("<|endoftext|>", "<|end_of_text|>"),
        tool_parser="qwen",
        reasoning=True,
        expected_mismatches=("thinking",),
    ),
    ChatFamily(
        name="smollm",
        template_signs=("<|im_start|>user", "<|im_end|>", "SmolLM"),
        end_markers=("<|im_end|>",),
        role_markers=("<|im_start|>",),
        stop_markers=("<|endoftext|>",),
        tool_parser="qwen",
    ),
    # Qwen3: the template leaves out the reasoning of turns before the last question; enable_thinking=False puts empty
    # reasoning before the coming turn.
    ChatFamily(
        name="qwen3",
        template_signs=("<|im_start|>user", "<|im_end|>", "<think>"),
        end_markers=("<|im_end|>",),
        role_markers=("<|im_start|>",),
        stop_markers=("<|endoftext|>",),
        tool_parser="qwen",
        reasoning=True,
        turn_only_kwargs=frozenset(("enable_thinking",)),
        expected_mismatches=("thinking",),
    ),
    # Qwen2.5 and other ChatML.
    ChatFamily(
        name="qwen",
        template_signs=("<|im_start|>user", "<|im_end|>"),
        end_markers=("<|im_end|>",),
        role_markers=("<|im_start|>",),
        stop_markers=("<|endoftext|>",),
        tool_parser="qwen",
    ),
)
"""The known families, the more particular before the more general."""
