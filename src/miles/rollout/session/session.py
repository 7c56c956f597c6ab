"""One agent's conversations: requests in, the tokens to continue out; the engine's spans in, a message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles.core.protocols import Completion
from miles.core.types import EMPTY, Author, Prompt, Reward, Status, Tokens, Trajectory
from miles.rollout.session.hearing import Hearing, before
from miles.rollout.session.ledger import Pick, branches_of
from miles.rollout.session.match import Found, Match, longest, loose_tool_call
from miles.rollout.session.message import ContextFull, Message, SessionError, Tool, media_of, text_of
from miles.rollout.session.render import Before, Renderer
from miles.rollout.session.speech import Parts
from miles.rollout.session.tree import Node, Path, Tree, Words

_SEEN = 64
"""Tokens at the end of a context that tell how a reply begins."""
_WHY = {"length": "was cut off at its length limit", "abort": "was aborted"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Turn:
    """A reply that is awaited. ``tokens`` is the whole context for the engine, ``room`` how many more fit (None: any).

    ``reused`` of the tokens were stored before; ``media`` are the parts of the conversation that are not text.
    """

    number: int
    question: int
    tokens: Tokens
    reused: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    room: int | None = None

    @property
    def media(self) -> tuple[Mapping[str, Any], ...]:
        return tuple(media_of(self.messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the policy said, as a message. ``finish_reason``: stop, tool_calls, length or abort; ``notes`` tell what in
    it could not be read as it was meant."""

    number: int
    message: Message
    finish_reason: str
    parts: Parts
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return text_of(self.message)

    @property
    def notes(self) -> tuple[str, ...]:
        return self.parts.notes


class Session:
    """Owns the tokens of one agent's conversations. Several turns may be awaited at once; nothing here waits."""

    def __init__(
        self,
        id: str,
        renderer: Renderer,
        *,
        match: Match = loose_tool_call,
        prompt: Prompt | None = None,
        max_context_len: int | None = None,
    ) -> None:
        self.id = id
        self.renderer = renderer
        self.prompt = prompt
        self.tree = Tree()
        self._match = match
        self._max_context_len = max_context_len
        self._begun = 0
        self._awaited: set[int] = set()

    @property
    def awaited(self) -> int:
        """How many turns have begun and not ended."""
        return len(self._awaited)

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **template: Any) -> Turn:
        """Find the longest stored conversation that ``messages`` replay, and render only what is new behind it.

        ``template`` are words to the chat template. What was replayed keeps its tokens; what replays nothing opens a
        conversation of its own. Raises SessionError, and leaves the tree as it was, on what cannot be continued.
        """
        self._check(messages)
        written = Words(tuple(tools), dict(template), self.renderer.passing)
        found = longest(self.tree, messages, self._match, frame=written.frame, words=written.words)
        question = found.question or self._ask(found, messages, written)
        path = self.tree.path(question.number)
        tokens = path.tokens
        new = 0 if found.question is not None else len(question.spans[0])
        self._begun += 1
        turn = Turn(
            number=self._begun,
            question=question.number,
            tokens=tokens,
            reused=len(tokens) - new,
            messages=path.messages,
            tools=written.tools,
            template=written.template,
            room=None if self._max_context_len is None else self._max_context_len - len(tokens),
        )
        self._awaited.add(turn.number)
        return turn

    def end(self, turn: Turn, completion: Completion, *, stop: Sequence[str] = ()) -> Reply:
        """Store the engine's spans as they are, and say what they mean; what is said ends before a ``stop`` string."""
        self._close(turn)
        sampled = [int(token) for span in completion.spans for token in span.tokens]
        parts = self.renderer.parts(turn.tokens[-_SEEN:].tolist(), sampled, turn.tools)
        parts = _stopped(parts, stop if completion.reason == "stop" else ())
        message = self._message(parts)
        node = self.tree.answer(turn.question, message, completion.spans, completion.reason, completion.given)
        finish = "tool_calls" if parts.calls and completion.reason == "stop" else completion.reason
        return Reply(
            number=node.number,
            message=message,
            finish_reason=finish,
            parts=parts,
            prompt_tokens=len(turn.tokens),
            completion_tokens=len(sampled),
            cached_tokens=completion.cached_tokens,
        )

    def hear(self, turn: Turn, *, stop: Sequence[str] = ()) -> Hearing:
        """For a reply that is told while it comes; what it says is the beginning of what ``end`` will."""
        read = self.renderer.growing(turn.tokens[-_SEEN:].tolist(), turn.tools)
        return Hearing(self.renderer.text, read, stop)

    def abandon(self, turn: Turn) -> None:
        """Nothing will come of this turn: its engine failed, or its client went away. One that has ended stays."""
        self._awaited.discard(turn.number)

    def trajectory(
        self,
        *,
        status: Status,
        reward: Reward | None = None,
        index: int = 0,
        metadata: Mapping[str, Any] = EMPTY,
        pick: Pick | None = None,
    ) -> Trajectory:
        """All that was sampled, each token trained on once, in a branch for each conversation (or those ``pick``ed).

        ``metadata`` is joined by ``text`` (the words of the last branch's last reply), ``reason`` (why it ended),
        ``messages`` (its conversation), ``turns`` (replies in all) and ``session``.
        """
        paths = self.tree.leaves()
        chosen = list(paths if pick is None else pick(paths)) or [self._unanswered()]
        last = chosen[-1]
        told = {
            "text": "" if last.reason is None else text_of(last.messages[-1]),
            "reason": last.reason or "abort",
            "messages": list(last.messages),
            "turns": sum(self.tree[number].is_reply for number in range(len(self.tree))),
            "session": self.id,
        }
        return Trajectory(
            branches=branches_of(chosen), status=status, reward=reward, index=index, metadata={**told, **metadata}
        )

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise SessionError(f"Session {self.id}: a request has no messages; send at least one.")
        if messages[-1].get("role") == "assistant":
            raise SessionError(
                f"Session {self.id}: the last message of a request is the assistant's, and a reply cannot be begun by "
                "the client; send a message of the user's or a tool's behind it."
            )

    def _ask(self, found: Found, messages: Sequence[Message], written: Words) -> Node:
        reply, new = found.reply, messages[found.taken :]
        if reply is None:
            before, tokens = 0, self.renderer.opening(new, written.tools, **written.template)
        else:
            path = self._extended(reply)
            before = len(path.tokens)
            state = Before(messages=path.messages, sampled=_joined(reply))
            tokens = self.renderer.following(state, new, written.tools, **written.template)
        if reply is None and not tokens:
            raise SessionError(f"Session {self.id}: a conversation renders to no token at all; give it text.")
        self._check_room(before + len(tokens))
        return self.tree.ask(None if reply is None else reply.number, new, tokens, written)

    def _extended(self, reply: Node) -> Path:
        path = self.tree.path(reply.number)
        if reply.is_cut:
            raise SessionError(
                f"Session {self.id}: the reply in message {len(path.messages)} {_WHY[str(reply.reason)]}, and such a "
                "turn cannot be extended; ask again without it, or with a larger limit."
            )
        return path

    def _check_room(self, length: int) -> None:
        if self._max_context_len is not None and length >= self._max_context_len:
            raise ContextFull(
                f"Session {self.id}: the conversation has {length} tokens, which leaves no room for a reply in a "
                f"context of {self._max_context_len}; shorten it, or raise --rollout-max-context-len."
            )

    def _message(self, parts: Parts) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": parts.content}
        if parts.reasoning:
            message["reasoning_content"] = parts.reasoning
        if parts.calls:
            message["tool_calls"] = [
                {
                    "id": call.id or f"call_{len(self.tree):04d}_{at}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for at, call in enumerate(parts.calls)
            ]
        return message

    def _close(self, turn: Turn) -> None:
        assert turn.number in self._awaited, "a turn of this session ends once"
        self._awaited.discard(turn.number)

    def _unanswered(self) -> Path:
        """A conversation to show for a session in which nothing was answered."""
        if not len(self.tree) and self.prompt is not None:
            self.tree.ask(None, self.prompt.messages, self.renderer.opening(self.prompt.messages, ()), Words())
        if not len(self.tree):
            raise SessionError(
                f"Session {self.id} was never asked anything, so there is nothing to train on; check that the agent "
                "calls the address it was given."
            )
        return self.tree.path(0)


def _joined(reply: Node) -> Tokens:
    assert all(span.author is Author.POLICY for span in reply.spans)
    return np.concatenate([span.tokens for span in reply.spans] or [np.zeros(0, np.int32)])


def _stopped(parts: Parts, stop: Sequence[str]) -> Parts:
    """Without the stop string that ended it, and what may stand behind that in the same token."""
    return replace(parts, reasoning=before(parts.reasoning, stop), content=before(parts.content, stop))
