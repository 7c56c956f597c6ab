"""What a model wrote, in parts: its reasoning, what it says, and the tools it calls. Nothing here ever raises."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from miles.core.spelling import certain
from miles.rollout.session.calls import SECTIONS, Call, Format, Tools
from miles.rollout.session.lenient import Malformed

THINK, THOUGHT = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All of a reply so far; ``notes`` say what was not written as it should be.

    While it is coming, reasoning, content and calls are the beginning of what they will be, and only grow.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How a reply is to be taken apart. ``thinking``: its reasoning is marked; ``opened``: the prompt has begun it."""

    format: Format | None = None
    tools: Tools | None = None
    thinking: bool = False
    opened: bool = False

    def parts(self, text: str, *, whole: bool = True) -> Parts:
        """``text`` in parts; while it is not ``whole``, nothing that may turn out to be a mark is given out."""
        reasoning, notes = "", []
        if self.thinking:
            reasoning, text, notes = self._thoughts(text, whole)
        if self.format is None or not self.tools:  # where no tool is offered, nothing is a call
            return Parts(reasoning=reasoning, content=text)
        said = spoken if whole else speaking
        content, calls, more = said(text, self.format, self.tools)
        return Parts(reasoning=reasoning, content=content, calls=tuple(calls), notes=(*notes, *more))

    def _thoughts(self, text: str, whole: bool) -> tuple[str, str, list[str]]:
        start = text.lstrip()
        if not self.opened and not start.startswith(THINK):
            undecided = not whole and THINK.startswith(start)
            return "", "" if undecided else text, []
        thought, mark, rest = start.removeprefix(THINK).partition(THOUGHT)
        if mark:
            return thought.strip(), rest.lstrip(), []
        at = self._call_in(thought)
        if not whole:
            return certain(thought[:at], (THOUGHT, *self._marks)).strip(), "", []
        if at < len(thought):
            return thought[:at].strip(), thought[at:], ["A tool was called before the thoughts were closed."]
        return thought.strip(), "", []

    def _call_in(self, thought: str) -> int:
        """Where thoughts that were never closed turn into a call; their end where they do not."""
        return min((at for mark in self._marks if (at := thought.find(mark)) >= 0), default=len(thought))

    @property
    def _marks(self) -> tuple[str, ...]:
        return self.format.marks if self.format is not None and self.tools else ()


def unframed(text: str, marks: Sequence[str]) -> str:
    """A turn's text without the marks that end it."""
    while (mark := next((mark for mark in marks if text.endswith(mark)), None)) is not None:
        text = text.removesuffix(mark)
    return text


def unframed_so_far(text: str, marks: Sequence[str]) -> str:
    """The same of a text that is coming, also without the beginning of one."""
    return unframed(certain(unframed(text, marks), marks), marks)


def spoken(text: str, format: Format, tools: Tools) -> tuple[str, list[Call], list[str]]:
    """A whole text: what is said in it, its calls, and notes. A block that cannot be read is said, not called."""
    calls: list[Call] = []
    notes: list[str] = []
    said: list[str] = []
    at = 0
    for block in format.find(text):
        said.append(text[at : block.start])
        at = block.stop
        try:
            found = format.read(block.body, tools)
        except Malformed as error:
            notes.append(f"A tool call could not be read and was left in the text: {error}.")
            said.append(text[block.start : block.stop])
            continue
        calls.extend(found)
        notes.extend(f"A call of {call.name} was read though {call.note}." for call in found if call.note)
        if not block.closed:
            notes.append(f"A call of {found[-1].name} was read though it was never closed.")
    said.append(text[at:])
    if not calls:
        return text, [], notes
    content = "".join(said)
    for mark in SECTIONS:
        content = content.replace(mark, "")
    return content.rstrip(), calls, notes


def speaking(text: str, format: Format, tools: Tools) -> tuple[str, list[Call], list[str]]:
    """A text that is still coming: what is said before its first call, and the calls that are closed."""
    if format.bare and text.lstrip().startswith(("{", "[")):  # all of it may be a call
        return "", [], []
    marks = (*format.marks, *SECTIONS)
    at = min((place for mark in marks if (place := text.find(mark)) >= 0), default=-1)
    if at < 0:
        return certain(text, marks).rstrip(), [], []
    calls: list[Call] = []
    for block in format.find(text):
        if not block.closed or (format.endless and block.stop == len(text)):
            break
        try:
            calls.extend(format.read(block.body, tools))
        except Malformed:
            continue
    return text[:at].rstrip(), calls, []
