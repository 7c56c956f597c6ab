"""Conversations of a family nobody has described: best effort, checked at every turn.

What is new is what two renderings of the template differ by, with the new messages and without. The shorter must be
the beginning of the longer, in text and in tokens, for the conversation itself and for a scaffold; else it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.core.protocols import Tokenizer
from miles.rollout.session.calls import Format
from miles.rollout.session.families.family import Family
from miles.rollout.session.message import Message, SessionError, Tool, schemas_of
from miles.rollout.session.render import Before, Reading
from miles.rollout.session.speech import THINK, Manner, Parts, unframed_so_far
from miles.rollout.session.template import WORD, Written, scaffold

UNKNOWN = Family(name="unknown", signs=(), closes=(), heads=(), thinking=True)
WARNING = (
    "No renderer is registered for this model's chat template: what follows a reply is found by comparing two "
    "renderings, and a conversation that the template rewrites is refused. Name a family for the session if it has one."
)


class ComparingRenderer:
    """A session.render.Renderer from nothing but a template. ``ends``: tokens that end a turn, where they are known."""

    family = UNKNOWN
    passing: frozenset[str] = frozenset()

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        calls: Format | None = None,
        ends: Sequence[int] = (),
        template: Mapping[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._calls = calls
        self._ends = frozenset(ends)
        self._written = Written(tokenizer, UNKNOWN, template or {})

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def boundaries(self) -> frozenset[int]:
        return self._ends

    def opening(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._tokenizer.encode(self._written.opening(messages, tools, **template))

    def whole(self, messages: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        return self._tokenizer.encode(self._written.text(messages, tools, opened=False, **template))

    def following(self, before: Before, new: Sequence[Message], tools: Sequence[Tool], **template: Any) -> list[int]:
        self._grown(before.messages, new, tools, template)
        frame = scaffold(before, new)
        shorter, longer = self._grown(frame, new, tools, template)
        at = shorter.rfind(WORD)
        if at < 0:
            raise _refused("it does not write what the assistant said")
        # The answer's end, as the template has it: what stands behind the word, less what a call is wrapped in.
        end = shorter[at + len(WORD) :]
        closing = self._tokenizer.encode(end if not frame[-1].get("tool_calls") else self._end(tools, template))
        return [*self._missing(closing, before), *self._tokenizer.encode(longer[len(shorter) :])]

    def parts(self, context: Sequence[int], sampled: Sequence[int], tools: Sequence[Tool]) -> Parts:
        kept, closing = list(sampled), self._closing()
        while kept and kept[-1] in closing:
            kept.pop()
        return self._manner(context, tools).parts(self._tokenizer.decode(kept))

    def growing(self, context: Sequence[int], tools: Sequence[Tool]) -> Reading:
        manner = self._manner(context, tools)
        marks = tuple(filter(None, (self._tokenizer.decode([token]) for token in self._closing())))
        return lambda text: manner.parts(unframed_so_far(text, marks), whole=False)

    def _manner(self, context: Sequence[int], tools: Sequence[Tool]) -> Manner:
        opened = self._tokenizer.decode(context[-16:]).rstrip().endswith(THINK)
        return Manner(format=self._calls, tools=schemas_of(tools), thinking=True, opened=opened)

    def _closing(self) -> frozenset[int]:
        """Tokens that end a turn and say nothing in it."""
        return self._ends | frozenset(self._tokenizer.encode(self._end((), {}))[:1])

    def _end(self, tools: Sequence[Tool], template: Mapping[str, Any]) -> str:
        """What the template writes behind an answer without calls."""
        plain = [{"role": "user", "content": "?"}, {"role": "assistant", "content": WORD}]
        return self._written.text(plain, tools, opened=False, **template).rpartition(WORD)[2]

    def _missing(self, closing: Sequence[int], before: Before) -> list[int]:
        """Of the tokens that end a turn, those behind the ones that were sampled."""
        sampled = before.sampled.tolist()
        for length in range(len(closing), 0, -1):
            if sampled[-length:] == list(closing[:length]):
                return list(closing[length:])
        if sampled and sampled[-1] in self._ends:
            return list(closing[1:])
        return list(closing)

    def _grown(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool], template: Mapping[str, Any]
    ) -> tuple[str, str]:
        shorter = self._written.text(messages, tools, opened=False, **template)
        longer = self._written.text([*messages, *new], tools, opened=True, **template)
        if not longer.startswith(shorter):
            raise _refused("it rewrites earlier turns when a message is added")
        encode = self._tokenizer.encode
        if encode(shorter) + encode(longer[len(shorter) :]) != encode(longer):
            raise _refused("a turn of it ends within a token")
        return shorter, longer


def _refused(why: str) -> SessionError:
    return SessionError(
        f"The chat template of this model is of no known family, and a reply cannot be followed: {why}; name a family "
        "for the session, or use a template that only appends."
    )
