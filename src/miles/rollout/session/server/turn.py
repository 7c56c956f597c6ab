"""One turn: the conversation found again, the engine asked, its tokens stored, the reply told.

begin ---> engine.generate ---> end            who waits: the request's task, on the engine alone
             |   |
             |   `-- deadline, client gone, session deleted: the engine's task is cancelled, the turn abandoned
             `------ tokens as they come, for a reply that is streamed; what is stored is what ``generate`` returns
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from miles.core.aloud import generate_aloud
from miles.core.errors import EngineError
from miles.core.protocols import Completion, Hear, Sampling
from miles.rollout.session.hearing import Hearing
from miles.rollout.session.message import ContextFull, SessionError, calls_of, function_of, text_of
from miles.rollout.session.server.ask import Ask, Call, Opened, Told
from miles.rollout.session.server.drawing import context_of, sampling_of, seed_of
from miles.rollout.session.server.entry import Entry
from miles.rollout.session.server.refusal import FULL, Refusal
from miles.rollout.session.server.sessions import Sessions, going_down
from miles.rollout.session.session import Reply, Turn

_ALL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn that may be taken: nothing that is wrong with a request is found after this."""

    entry: Entry
    ask: Ask
    turn: Turn
    sampling: Sampling
    unused: tuple[str, ...]
    opened: Opened

    @property
    def ended(self) -> Turn:
        """The turn as its reply is read: where no call is wanted, what looks like one is text.

        The tools stay in the conversation all the same.
        """
        return self.turn if self.ask.calls else replace(self.turn, tools=())

    def hear(self) -> Hearing:
        """For the reply while it comes."""
        return self.entry.session.hear(self.ended, stop=self.sampling.stop)


class Turns:
    """Takes turns in sessions. ``decode`` keeps special tokens; ``wall`` is what replies are dated with."""

    def __init__(
        self, sessions: Sessions, decode: Callable[[Sequence[int]], str], wall: Callable[[], float] = time.time
    ) -> None:
        self._sessions = sessions
        self._decode = decode
        self._wall = wall

    def count(self, entry: Entry, ask: Ask) -> int:
        """Tokens the engine would read."""
        turn = _begin(entry, ask)
        entry.session.abandon(turn)
        return len(turn.tokens)

    def begin(self, entry: Entry, ask: Ask) -> Begun:
        """Find out what the engine is to continue, and how; refuses what cannot be served. ``take`` must follow."""
        if self._sessions.draining:
            raise going_down()
        left = entry.check()
        turn = _begin(entry, ask)
        room = min(each for each in (turn.room, left, _ALL) if each is not None)
        terms, wish = entry.terms, ask.wish
        try:
            sampling, unused = sampling_of(terms.sampling, wish, held=terms.held, room=room)
        except Refusal:
            entry.session.abandon(turn)
            raise
        if terms.held or wish.seed is None:
            context = context_of(turn.tokens)
            seed = seed_of(terms.sampling.seed, context, entry.asked_before(context))
        else:
            seed = wish.seed
        sampling = replace(sampling, seed=seed)
        opened = Opened(id=uuid.uuid4().hex, created=int(self._wall()), context=turn.tokens)
        return Begun(entry, ask, turn, sampling, unused, opened)

    async def take(self, begun: Begun, hear: Hear | None = None) -> Told:
        """The reply; ``hear`` is told its tokens as they come. Cancelling this frees the engine."""
        entry, turn = begun.entry, begun.turn
        self._sessions.enter()
        try:
            completion = await self._generated(begun, hear)
        except BaseException:
            entry.session.abandon(turn)
            raise
        finally:
            self._sessions.leave()
            entry.used = self._sessions.clock()
        reply = entry.session.end(begun.ended, completion, stop=begun.sampling.stop)
        entry.turns += 1
        entry.written += reply.completion_tokens
        entry.notes.extend(reply.notes)
        if completion.reason == "abort":
            entry.aborted, entry.failure = True, "the engine aborted a turn"
            raise Refusal("The engine aborted this turn; what it wrote is kept, and cannot be extended.", status=503)
        return self._told(begun, reply, completion)

    async def _generated(self, begun: Begun, hear: Hear | None) -> Completion:
        entry, seconds = begun.entry, self._sessions.limits.turn_seconds
        engine, tokens, sampling = entry.engine, begun.turn.tokens, begun.sampling
        asked = engine.generate(tokens, sampling) if hear is None else generate_aloud(engine, tokens, sampling, hear)
        work = asyncio.ensure_future(asked)
        entry.watch(work)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            entry.failure = f"a turn took longer than {seconds:g} s"
            raise Refusal(f"The engine did not end this turn within {seconds:g} s.", status=504) from error
        except EngineError as error:
            entry.failure = str(error)
            raise Refusal(f"The engine cannot serve this turn: {error}.", status=502) from error
        except asyncio.CancelledError:
            if entry.closed and work.cancelled() and not _is_cancelled():
                raise Refusal(f"Session {entry.id} was closed while this turn was under way.", status=404) from None
            raise
        finally:
            work.cancel()

    def _told(self, begun: Begun, reply: Reply, completion: Completion) -> Told:
        message = reply.message
        tokens = [int(token) for span in completion.spans for token in span.tokens]
        calls = (
            Call(id=str(call["id"]), name=str(function_of(call)["name"]), arguments=str(function_of(call)["arguments"]))
            for call in calls_of(message)
        )
        return Told(
            id=begun.opened.id,
            created=begun.opened.created,
            content=text_of(message),
            reasoning=message.get("reasoning_content") or "",
            calls=tuple(calls),
            finish=reply.finish_reason,
            matched=self._matched(begun, tokens, completion),
            context=begun.opened.context,
            completion=completion,
            words=tuple(self._decode([token]) for token in tokens) if begun.ask.logprobs else (),
            unused=begun.unused,
        )

    def _matched(self, begun: Begun, tokens: list[int], completion: Completion) -> str | None:
        stops = begun.ask.wish.stop
        if not stops or completion.reason != "stop":
            return None
        text = self._decode(tokens)
        found = [(text.find(stop), stop) for stop in stops if stop in text]
        return min(found)[1] if found else None


def _is_cancelled() -> bool:
    """Is it this task that is told to end, and not only what it waits for?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _begin(entry: Entry, ask: Ask) -> Turn:
    try:
        return entry.session.begin(ask.messages, ask.tools, **ask.template)
    except ContextFull as error:
        raise Refusal(str(error), param="messages", code=FULL) from error
    except SessionError as error:
        raise Refusal(str(error), param="messages") from error
