"""Session: one agent's conversations. Requests in, tokens for the engine out; the engine's spans in, a message out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from miles.core.media import Images
from miles.core.protocols import Completion
from miles.core.types import EMPTY, Author, Prompt, Reward, Status, Tokens, Trajectory
from miles.rollout.serving.errors import ContextLengthError, SessionError
from miles.rollout.serving.http import MAX_TEXT_PER_TOKEN
from miles.rollout.serving.messages import Message, Tool, extract_text, format_tool_call
from miles.rollout.serving.output_parser import ParsedOutput, StreamingParser, truncate_at_stop
from miles.rollout.session.branches import SamplePicker, build_branches
from miles.rollout.session.match import MessageMatcher, ReplayMatch, find_longest_match, loose_tool_call
from miles.rollout.session.render import ChatRenderer, ConversationState
from miles.rollout.session.tree import ConversationNode, ConversationPath, ConversationTree, TemplateArgs

_TAIL_TOKENS = 64
"""Tokens at the end of a context from which the parser tells how a reply begins."""
_TRUNCATION = {"length": "was cut off at its length limit", "abort": "was aborted"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SessionTurn:
    """A pending reply. ``tokens`` is the whole context for the engine, with ``images`` among them;
    ``max_new_tokens`` is what the context leaves.

    ``reused`` of the tokens were stored before.
    """

    number: int
    question: int
    tokens: Tokens
    reused: int
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    template: Mapping[str, Any] = field(default_factory=lambda: EMPTY)
    max_new_tokens: int | None = None
    images: Images = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionReply:
    """The policy's reply as a message. ``finish_reason``: stop, tool_calls, length or abort."""

    number: int
    message: Message
    finish_reason: str
    output: ParsedOutput
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        return extract_text(self.message)

    @property
    def notes(self) -> tuple[str, ...]:
        """What in the reply could not be parsed as it was meant."""
        return self.output.notes


class Session:
    """Stores the tokens of one agent's conversations. Several turns may be pending at once; nothing here blocks."""

    def __init__(
        self,
        id: str,
        renderer: ChatRenderer,
        *,
        match: MessageMatcher = loose_tool_call,
        prompt: Prompt | None = None,
        max_context_len: int | None = None,
    ) -> None:
        self.id = id
        self.renderer = renderer
        self.prompt = prompt
        self.tree = ConversationTree()
        self._match = match
        self._max_context_len = max_context_len
        self._num_turns = 0
        self._pending: set[int] = set()

    @property
    def num_pending(self) -> int:
        """How many turns have begun and not ended."""
        return len(self._pending)

    async def prepare(self, messages: Sequence[Message]) -> list[Message]:
        """Messages for ``begin`` with their images in the media store; raises SessionError at a bad image."""
        return await self.renderer.prepare(messages)

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool] = (), **template: Any) -> SessionTurn:
        """Find the longest stored conversation that ``messages`` replay, and render only what is new after it.

        ``template`` are arguments of the chat template. What is replayed keeps its tokens; a request that replays
        nothing starts a conversation. Raises SessionError, and leaves the tree unchanged, if it cannot be continued.
        """
        self._check_messages(messages)
        self._check_text_length(messages)
        args = TemplateArgs(tuple(tools), dict(template), self.renderer.turn_only_kwargs)
        match = find_longest_match(self.tree, messages, self._match, frame=args.frame, key=args.key)
        question = match.question or self._add_question(match, messages, args)
        conversation = self.tree.get_conversation(question.number)
        tokens = conversation.tokens
        new = 0 if match.question is not None else len(question.spans[0])
        self._num_turns += 1
        turn = SessionTurn(
            number=self._num_turns,
            question=question.number,
            tokens=tokens,
            reused=len(tokens) - new,
            messages=conversation.messages,
            tools=args.tools,
            template=args.template,
            max_new_tokens=None if self._max_context_len is None else self._max_context_len - len(tokens),
            images=conversation.images,
        )
        self._pending.add(turn.number)
        return turn

    def end(self, turn: SessionTurn, completion: Completion, *, stop: Sequence[str] = ()) -> SessionReply:
        """Store the engine's spans unchanged and parse them into a message, which ends before a ``stop`` string."""
        assert turn.number in self._pending, "a turn of this session ends once"
        self._pending.discard(turn.number)
        sampled = [int(token) for span in completion.spans for token in span.tokens]
        output = self.renderer.parse_reply(turn.tokens[-_TAIL_TOKENS:].tolist(), sampled, turn.tools)
        finish_reason = completion.finish_reason
        if finish_reason == "stop":
            # Without the stop string that ended it, and what may follow that in the same token.
            output = replace(
                output,
                reasoning=truncate_at_stop(output.reasoning, stop),
                content=truncate_at_stop(output.content, stop),
            )
        message = self._build_message(output)
        node = self.tree.add_reply(turn.question, message, completion.spans, finish_reason, completion.prompt_extras)
        return SessionReply(
            number=node.number,
            message=message,
            finish_reason="tool_calls" if output.tool_calls and finish_reason == "stop" else finish_reason,
            output=output,
            prompt_tokens=len(turn.tokens),
            completion_tokens=len(sampled),
            cached_tokens=completion.cached_tokens,
        )

    def stream_parser(self, turn: SessionTurn, *, stop: Sequence[str] = ()) -> StreamingParser:
        """A parser for a reply that streams; what it returns is a prefix of what ``end`` will return."""
        parse = self.renderer.build_partial_parser(turn.tokens[-_TAIL_TOKENS:].tolist(), turn.tools)
        return StreamingParser(self.renderer.decode, parse, stop)

    def abandon(self, turn: SessionTurn) -> None:
        """Drop a pending turn: its engine failed, or its client disconnected. A turn that has ended stays."""
        self._pending.discard(turn.number)

    def trajectory(
        self,
        *,
        status: Status,
        reward: Reward | None = None,
        index: int = 0,
        metadata: Mapping[str, Any] = EMPTY,
        pick: SamplePicker | None = None,
    ) -> Trajectory:
        """All sampled tokens, each trained on once, with a branch for each conversation (or those ``pick`` returns).

        Adds to ``metadata``: ``text`` (of the last branch's last reply), ``reason`` (why it ended), ``messages`` (its
        conversation), ``turns`` (replies in all) and ``session``.
        """
        leaves = self.tree.leaves()
        conversations = list(leaves if pick is None else pick(leaves)) or [self._get_unanswered()]
        last = conversations[-1]
        summary = {
            "text": "" if last.finish_reason is None else extract_text(last.messages[-1]),
            "reason": last.finish_reason or "abort",
            "messages": list(last.messages),
            "turns": sum(self.tree[number].is_reply for number in range(len(self.tree))),
            "session": self.id,
        }
        return Trajectory(
            branches=build_branches(conversations),
            status=status,
            reward=reward,
            index=index,
            metadata={**summary, **metadata},
        )

    def _check_messages(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise SessionError(f"Session {self.id}: a request has no messages; send at least one.")
        if messages[-1].get("role") == "assistant":
            raise SessionError(
                f"Session {self.id}: the last message of a request is the assistant's, and a client cannot begin a "
                "reply; send a user or tool message after it."
            )

    def _add_question(self, match: ReplayMatch, messages: Sequence[Message], args: TemplateArgs) -> ConversationNode:
        reply, new = match.reply, messages[match.num_messages :]
        if reply is None:
            before, rendered = 0, self.renderer.render_prompt(new, args.tools, **args.template)
            if not rendered.tokens:
                raise SessionError(f"Session {self.id}: a conversation renders to no token at all; give it text.")
        else:
            conversation = self._get_extensible(reply)
            before = len(conversation.tokens)
            state = ConversationState(messages=conversation.messages, sampled=_join_tokens(reply))
            rendered = self.renderer.render_continuation(state, new, args.tools, **args.template)
        length = before + len(rendered.tokens)
        if self._max_context_len is not None and length >= self._max_context_len:
            raise ContextLengthError(
                f"Session {self.id}: the conversation has {length} tokens, which leaves no room for a reply in a "
                f"context of {self._max_context_len}; shorten it, or raise --rollout-max-context-len."
            )
        parent = None if reply is None else reply.number
        return self.tree.add_question(parent, new, rendered.tokens, args, rendered.images)

    def _check_text_length(self, messages: Sequence[Message]) -> None:
        """Refuse a conversation that is far too long before it is tokenized."""
        limit = None if self._max_context_len is None else MAX_TEXT_PER_TOKEN * self._max_context_len
        length = sum(len(extract_text(message)) for message in messages)
        if limit is not None and length > limit:
            raise ContextLengthError(
                f"Session {self.id}: the conversation has {length} characters, far more than a context of "
                f"{self._max_context_len} tokens; shorten it, or raise --rollout-max-context-len."
            )

    def _get_extensible(self, reply: ConversationNode) -> ConversationPath:
        conversation = self.tree.get_conversation(reply.number)
        if reply.is_truncated:
            raise SessionError(
                f"Session {self.id}: the reply in message {len(conversation.messages)} "
                f"{_TRUNCATION[str(reply.finish_reason)]}, and such a turn cannot be extended; ask again without it, "
                "or with a larger limit."
            )
        return conversation

    def _build_message(self, output: ParsedOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": output.content}
        if output.reasoning:
            message["reasoning_content"] = output.reasoning
        if output.tool_calls:
            message["tool_calls"] = [
                format_tool_call(call.id or f"call_{len(self.tree):04d}_{index}", call.name, call.arguments)
                for index, call in enumerate(output.tool_calls)
            ]
        return message

    def _get_unanswered(self) -> ConversationPath:
        """The conversation of a session without any reply."""
        if not len(self.tree) and self.prompt is not None:
            messages = self.prompt.messages
            rendered = self.renderer.render_prompt(messages, ())
            self.tree.add_question(None, messages, rendered.tokens, TemplateArgs(), rendered.images)
        if not len(self.tree):
            raise SessionError(
                f"Session {self.id} never got a request, so there is nothing to train on; check that the agent calls "
                "the address it was given."
            )
        return self.tree.get_conversation(0)


def _join_tokens(reply: ConversationNode) -> Tokens:
    assert all(span.author is Author.POLICY for span in reply.spans)
    return np.concatenate([span.tokens for span in reply.spans] or [np.zeros(0, np.int32)])
