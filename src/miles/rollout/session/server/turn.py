"""One turn: find the stored conversation, call the engine, store its tokens, return the reply.

begin ---> engine.generate ---> end            who waits: the request's task, for the engine alone
             |   |
             |   `-- deadline, client disconnected, session deleted: the engine's task is cancelled, the turn abandoned
             `------ tokens as they arrive, for a streamed reply; what ``generate`` returns is what is stored
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from miles.core.errors import EngineError
from miles.core.protocols import Completion, OnTokens, SamplingParams, stream_or_generate
from miles.rollout.seeds import derive_turn_seed, hash_context
from miles.rollout.serving.errors import CONTEXT_LENGTH_EXCEEDED, ContextLengthError, RequestError, SessionError
from miles.rollout.serving.messages import extract_text, get_function, get_tool_calls
from miles.rollout.serving.output_parser import StreamingParser
from miles.rollout.serving.tool_parsers import ToolCall
from miles.rollout.session.server.registry import SessionEntry, SessionRegistry, shutdown_error
from miles.rollout.session.server.sampling import choose_turn_sampling
from miles.rollout.session.server.types import TurnHeader, TurnRequest, TurnResult
from miles.rollout.session.session import SessionReply, SessionTurn

_UNLIMITED = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StartedTurn:
    """A turn that passed every check of its request. ``ignored`` names sampling fields the session does not follow."""

    entry: SessionEntry
    request: TurnRequest
    turn: SessionTurn
    sampling: SamplingParams
    ignored: tuple[str, ...]
    header: TurnHeader

    @property
    def parsed_turn(self) -> SessionTurn:
        """The turn as its reply is parsed: where no call is allowed, what looks like one is text.

        The tools stay in the conversation all the same.
        """
        return self.turn if self.request.allow_tool_calls else replace(self.turn, tools=())

    def build_stream_parser(self) -> StreamingParser:
        return self.entry.session.stream_parser(self.parsed_turn, stop=self.sampling.stop)


class TurnRunner:
    """Runs turns of sessions. ``decode`` keeps special tokens; ``wall_clock`` dates replies."""

    def __init__(
        self,
        sessions: SessionRegistry,
        decode: Callable[[Sequence[int]], str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._sessions = sessions
        self._decode = decode
        self._wall_clock = wall_clock

    async def count_tokens(self, entry: SessionEntry, request: TurnRequest) -> int:
        """The number of tokens the engine would read."""
        turn = await _begin_turn(entry, request)
        entry.session.abandon(turn)
        return len(turn.tokens)

    async def start(self, entry: SessionEntry, request: TurnRequest) -> StartedTurn:
        """Find what the engine continues, and how it samples; refuses what cannot be served. ``run`` must follow."""
        if self._sessions.draining:
            raise shutdown_error()
        tokens_left = entry.check_limits()
        turn = await _begin_turn(entry, request)
        limits = (turn.max_new_tokens, tokens_left, _UNLIMITED)
        settings = entry.settings
        try:
            sampling, ignored = choose_turn_sampling(
                settings.sampling,
                request,
                hold=settings.hold,
                max_new_tokens=min(limit for limit in limits if limit is not None),
            )
        except RequestError:
            entry.session.abandon(turn)
            raise
        seed = request.seed
        if settings.hold or seed is None:
            context_hash = hash_context(turn.tokens)
            seed = derive_turn_seed(settings.sampling.seed, context_hash, entry.count_request(context_hash))
        header = TurnHeader(id=uuid.uuid4().hex, created=int(self._wall_clock()), context=turn.tokens)
        return StartedTurn(entry, request, turn, replace(sampling, seed=seed), ignored, header)

    async def run(self, started: StartedTurn, on_tokens: OnTokens | None = None) -> TurnResult:
        """The reply; ``on_tokens`` gets its tokens as they arrive. Cancelling this frees the engine."""
        entry = started.entry
        self._sessions.start_turn()
        try:
            completion = await self._generate(started, on_tokens)
        except BaseException:
            entry.session.abandon(started.turn)
            raise
        finally:
            self._sessions.finish_turn()
            entry.last_used = self._sessions.clock()
        reply = entry.session.end(started.parsed_turn, completion, stop=started.sampling.stop)
        entry.num_turns += 1
        entry.num_tokens += reply.completion_tokens
        entry.notes.extend(reply.notes)
        if completion.finish_reason == "abort":
            entry.aborted, entry.failure = True, "the engine aborted a turn"
            raise RequestError("The engine aborted this turn; its tokens are kept and cannot be extended.", status=503)
        return self._build_result(started, reply, completion)

    async def _generate(self, started: StartedTurn, on_tokens: OnTokens | None) -> Completion:
        entry, seconds = started.entry, self._sessions.limits.turn_seconds
        engine = entry.engine
        tokens = started.turn.tokens
        sampling = started.sampling
        if on_tokens is None:
            generation = engine.generate(tokens, sampling, started.turn.images)
        else:
            generation = stream_or_generate(engine, tokens, sampling, on_tokens, started.turn.images)
        work = asyncio.ensure_future(generation)
        entry.watch(work)
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                return await work
        except TimeoutError as error:
            if not limit.expired():
                raise
            entry.failure = f"a turn took longer than {seconds:g} s"
            raise RequestError(f"The engine did not end this turn within {seconds:g} s.", status=504) from error
        except EngineError as error:
            entry.failure = str(error)
            raise RequestError(f"The engine cannot serve this turn: {error}.", status=502) from error
        except asyncio.CancelledError:
            if entry.closed and work.cancelled() and not _is_cancelling():
                raise RequestError(f"Session {entry.id} was closed while this turn was running.", status=404) from None
            raise
        finally:
            work.cancel()

    def _build_result(self, started: StartedTurn, reply: SessionReply, completion: Completion) -> TurnResult:
        message = reply.message
        tokens = [int(token) for span in completion.spans for token in span.tokens]
        functions = [(str(call["id"]), get_function(call)) for call in get_tool_calls(message)]
        return TurnResult(
            id=started.header.id,
            created=started.header.created,
            content=extract_text(message),
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(
                ToolCall(id=id, name=str(function["name"]), arguments=str(function["arguments"]))
                for id, function in functions
            ),
            finish_reason=reply.finish_reason,
            matched_stop=self._find_matched_stop(started, tokens, completion),
            context=started.header.context,
            completion=completion,
            token_texts=tuple(self._decode([token]) for token in tokens) if started.request.logprobs else (),
            ignored=started.ignored,
        )

    def _find_matched_stop(self, started: StartedTurn, tokens: list[int], completion: Completion) -> str | None:
        stops = started.request.sampling.stop_strings
        if not stops or completion.finish_reason != "stop":
            return None
        text = self._decode(tokens)
        return min(((text.find(stop), stop) for stop in stops if stop in text), default=(0, None))[1]


def _is_cancelling() -> bool:
    """Whether this task itself is being cancelled, and not only what it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _begin_turn(entry: SessionEntry, request: TurnRequest) -> SessionTurn:
    """Begin the turn; its images are read and processed before, off the event loop."""
    try:
        messages = await entry.session.prepare(request.messages)
        if entry.closed:
            raise RequestError(f"Session {entry.id} was closed while its images were read.", status=404)
        return entry.session.begin(messages, request.tools, **request.template)
    except ContextLengthError as error:
        raise RequestError(str(error), param="messages", code=CONTEXT_LENGTH_EXCEEDED) from error
    except SessionError as error:
        raise RequestError(str(error), param="messages") from error
