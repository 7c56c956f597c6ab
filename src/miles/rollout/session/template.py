"""Conversations as a model's own chat template writes them, and only what is new of them behind sampled tokens.

New messages are written behind a scaffold, a question and an answer that hold a word nobody says, and cut off there:

    template of  question, answer(WORD), new messages       ... <start> WORD <end> \\n <start> new ... <start>
                                                                          ^ cut behind the answer's end
                                                             sampled ... <end> | \\n <start> new ... <start>

So the template's own account of the earlier turns, which it may tell otherwise each time, never matters. The mark at
the cut is a token by itself, and no text is tokenised across it: what is on either side has the same tokens in one
piece and in two.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.errors import MilesError, UsageError
from miles.core.protocols import Tokenizer
from miles.rollout.session.calls import FORMATS, Format
from miles.rollout.session.families.family import Family
from miles.rollout.session.message import (
    Message,
    SessionError,
    Tool,
    calls_of,
    function_of,
    media_of,
    parts_of,
    schemas_of,
    text_of,
)
from miles.rollout.session.render import Before, Reading
from miles.rollout.session.speech import THINK, THOUGHT, Manner, Parts, unframed, unframed_so_far

WORD = "Zwischenruf"
UNHEARD = "The chat template does not tell the model of the tools it is offered; describe them in the system message."
_TAIL = 16
"""Tokens at the end of a context among which the mark that begins thoughts is looked for."""


class Written:
    """A chat template, called with messages as templates expect them. ``defaults`` are words said to it every time."""

    def __init__(self, tokenizer: Tokenizer, family: Family, defaults: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._family = family
        self._defaults = dict(defaults)
        self._writes_calls = True
        self._writes_calls = WORD in self._probe()
        self._told = False

    def _probe(self) -> str:
        """What the template makes of a message that is a call alone."""
        try:
            return self.text(scaffold(None, [{"role": "tool"}]), (), opened=False)
        except MilesError:
            return WORD  # it will say so itself when there is a call

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> str:
        """A whole conversation with the next turn opened. Warns, once, where the model hears nothing of the tools."""
        text = self.text(messages, tools, opened=True, **template)
        if tools and not self._told:
            self._told = True
            if text == self.text(messages, (), opened=True, **template):
                warnings.warn(UNHEARD, stacklevel=2)
        return text

    def behind(self, before: Before, new: Sequence[Message], tools: Sequence[Tool], **template: Any) -> str:
        """``new``, and the next turn opened, behind a scaffold in place of all that was before."""
        return self.text([*scaffold(before, new), *new], tools, opened=True, **template)

    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opened: bool, **template: Any) -> str:
        """What the template writes; ``opened``: with the beginning of the assistant's next turn."""
        words = {**self._defaults, **template, "add_generation_prompt": opened}
        if tools:
            words["tools"] = [dict(tool) for tool in tools]
        try:
            return self._tokenizer.written(self._put(messages), **words)
        except MilesError:
            raise
        except Exception as error:  # a template is a program of the model's maker, and may fail in any way
            raise SessionError(f"The chat template cannot write this conversation: {error}.") from error

    def _put(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        put = [self._message(message) for message in messages]
        adapt = self._family.adapt
        return put if adapt is None else adapt(put)

    def _message(self, message: Message) -> dict[str, Any]:
        # Templates ask whether a field is there at all, so one that holds nothing must not be.
        put = {name: value for name, value in message.items() if value is not None and value != []}
        if not parts_of(message) or not list(media_of([message])):
            put["content"] = text_of(message)
        if calls := calls_of(message):
            put["tool_calls"] = [self._call(call) for call in calls]
            if not self._writes_calls:
                put["content"] = "\n".join([*filter(None, [text_of(message)]), *map(_tagged, put.pop("tool_calls"))])
        return put

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = function_of(call)
        arguments = function.get("arguments") or {}
        if self._family.arguments_as_text:
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        elif isinstance(arguments, str):
            arguments = _object(arguments)
        own = {"id": call["id"]} if call.get("id") else {}
        return {**own, "type": "function", "function": {"name": function.get("name"), "arguments": arguments}}


def _tagged(call: Mapping[str, Any]) -> str:
    """A call as most models know it, for templates that write none."""
    function = call["function"]
    value = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def scaffold(before: Before | None, new: Sequence[Message]) -> list[dict[str, Any]]:
    """A question and an answer for ``new`` to stand behind; with a call, where a result or the true answer has one."""
    calls = () if before is None else calls_of(before.reply)
    answer: dict[str, Any] = {"role": "assistant", "content": WORD}
    if calls or new[0].get("role") == "tool":
        name = function_of(calls[0]).get("name") if calls else new[0].get("name") or "tool"
        id = (calls[0].get("id") if calls else None) or new[0].get("tool_call_id") or "call_0"
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": {"word": WORD}}}
        answer |= {"content": "", "tool_calls": [call]}
    return [{"role": "user", "content": "?"}, answer]


class TemplateRenderer:
    """A session.render.Renderer for a known family; refuses (UsageError) a tokenizer that lacks the family's marks."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        family: Family,
        *,
        calls: Format | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self.family = family
        self._calls = calls or (None if family.calls is None else FORMATS[family.calls])
        self._written = Written(tokenizer, family, template or {})
        self._ids = {mark: found[0] for mark in family.marks if len(found := tokenizer.encode(mark)) == 1}
        missing = [mark for mark in (family.closes[:1] or family.heads[:1]) if mark not in self._ids]
        if missing:
            raise UsageError(
                f"The tokenizer has no token {missing[0]}, which ends a turn of the family {family.name}; name another "
                "family for the session, or none."
            )
        self._closing = frozenset(self._ids[mark] for mark in family.closes if mark in self._ids)

    @property
    def passing(self) -> frozenset[str]:
        return self.family.passing

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def boundaries(self) -> frozenset[int]:
        return frozenset(self._ids.values())

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._tokenizer.encode(self._written.opening(messages, tools, **template))

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._tokenizer.encode(self._written.text(messages, tools, opened=False, **template))

    def following(self, before: Before, new: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        text = self._written.behind(before, new, tools, **template)
        last = int(before.sampled[-1]) if len(before.sampled) else None
        if not self.family.closes:
            return self._behind_nothing(self._cut_before(text), last)
        mark, right = self._cut_behind(text)
        tokens = self._tokenizer.encode(mark + right)
        assert tokens[0] == self._ids[mark], "a mark is a token by itself"
        return tokens[1:] if last in self._closing else tokens

    def parts(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> Parts:
        return self._reading(context, tools, whole=True)(self._tokenizer.decode(sampled))

    def growing(self, context: Sequence[int], tools: Sequence[Tool]) -> Reading:
        read = self._reading(context, tools, whole=False)
        return lambda text: read(unframed_so_far(text, self.family.marks))

    def _reading(self, context: Sequence[int], tools: Sequence[Tool], *, whole: bool) -> Reading:
        known, speech = schemas_of(tools), self.family.speech
        if speech is not None:
            return lambda text: speech(text, known, whole)
        thinking, begun = self.family.thinking, self._tokenizer.decode(context[-_TAIL:]).rstrip()
        manner = Manner(format=self._calls, tools=known, thinking=thinking, opened=begun.endswith(THINK))
        # Behind thoughts that the prompt has ended, the line's end before the answer is no part of the answer.
        blank = "\n" if thinking and begun.endswith(THOUGHT) else ""
        return lambda text: manner.parts(unframed(text, self.family.marks).lstrip(blank), whole=whole)

    def _cut_behind(self, text: str) -> tuple[str, str]:
        """The mark that ends the scaffold's answer, and all behind it."""
        at = text.find(WORD)
        ends = [(place, mark) for mark in self.family.closes if (place := text.find(mark, at)) >= 0]
        if at < 0 or not ends:
            raise _unlike(self.family)
        place, mark = min(ends)
        return mark, text[place + len(mark) :]

    def _cut_before(self, text: str) -> str:
        at = text.find(WORD)
        heads = [place for mark in self.family.heads if (place := text.find(mark, at)) >= 0]
        if at < 0 or not heads:
            raise _unlike(self.family)
        return text[min(heads) :]

    def _behind_nothing(self, right: str, last: int | None) -> list[int]:
        """Where the head of the next turn ends this one: it is not written again if it was sampled."""
        tokens = self._tokenizer.encode(right)
        return tokens[1:] if tokens[0] == last else tokens


def _unlike(family: Family) -> SessionError:
    return SessionError(
        f"The chat template does not write turns as the family {family.name} does, so nothing can be written behind "
        "one; name another family for the session, or none."
    )
