"""The answer to one request, as it comes: pieces to iterate over, and the whole of it at the end.

Shapes: L layers with experts, x experts a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from miles.backends.native.request import Ask, Finish, Piece, Scores, Top
from miles.backends.native.sequence import Sequence
from miles.core.protocols import Completion
from miles.core.types import Array, Version


class Answer:
    """What ``engine.open`` returns: an async iterator of pieces. All of it belongs to the engine's event loop.

    Pieces hold what came since the last one; a slow reader gets longer pieces and holds nobody up. Whoever stops
    caring calls ``cancel`` (leaving an ``async with`` block does), or the request runs to its end unread.
    """

    def __init__(
        self,
        sequence: Sequence,
        none_expert: Array | None,
        *,
        listen: Callable[[Answer], None],
        leave: Callable[[Answer], None],
    ) -> None:
        self.ask: Ask = sequence.ask
        self.sequence = sequence
        self._none_expert = none_expert
        self._listen = listen
        self._leave = leave
        self._read = 0
        self._outcome: Completion | Exception | None = None
        self._for_more: list[asyncio.Future[None]] = []
        self._for_all: list[asyncio.Future[None]] = []

    # -- reading ----------------------------------------------------------------------------

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> Piece:
        sequence, first = self.sequence, self._read
        while True:
            ended = self._outcome is not None
            # Log-probs are written last: what has one is complete, though a step may be writing just now.
            end = len(sequence.logprobs)
            if end > first:
                break
            if isinstance(self._outcome, Exception):
                raise self._outcome
            if ended:
                raise StopAsyncIteration
            if not self._for_more:
                self._listen(self)
            await _told(self._for_more)
        self._read = end
        at = sequence.prompt_length
        return Piece(
            first=first,
            tokens=sequence.tokens[at + first : at + end],
            logprobs=sequence.logprobs[first:end],
            tops=sequence.tops[first:end],
            watched=sequence.watched[first:end],
        )

    async def completion(self) -> Completion:
        """The whole answer, once it has ended. Cancelling whoever waits here cancels the request."""
        try:
            if self._outcome is None:
                await _told(self._for_all)
        except asyncio.CancelledError:
            self.cancel()
            raise
        assert self._outcome is not None
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def cancel(self) -> None:
        """Let go of the request if it has not ended: what it held is freed, and its answer is gone."""
        if self._outcome is None:
            self._leave(self)

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # -- what there is of it ----------------------------------------------------------------

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None while it goes on."""
        return None if self._outcome is None else self.sequence.finish()

    @property
    def scores(self) -> Scores | None:
        """Log-probs of the prompt so far, where they were asked for."""
        sequence, first = self.sequence, self.ask.score_from
        if first is None:
            return None
        return Scores(
            first=first,
            logprobs=tuple(sequence.scores),
            tops=tuple(sequence.score_tops) if self.ask.tops else (),
            watched=tuple(sequence.score_watched) if self.ask.watch else (),
        )

    @property
    def tokens(self) -> list[int]:
        """What was drawn so far."""
        return self.sequence.tokens[self.sequence.prompt_length :]

    @property
    def logprobs(self) -> list[float]:
        """The log-probs of what was drawn so far."""
        return list(self.sequence.logprobs)

    @property
    def tops(self) -> list[tuple[Top, ...]]:
        """The likeliest tokens beside each drawn one."""
        return list(self.sequence.tops)

    @property
    def watched(self) -> list[tuple[Top, ...]]:
        """The watched tokens beside each drawn one."""
        return list(self.sequence.watched)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found computed."""
        return max(0, self.sequence.cached_tokens)

    @property
    def preemptions(self) -> int:
        """How often it had to give its pages up."""
        return self.sequence.preemptions

    @property
    def version(self) -> Version | None:
        """The weights that drew the last token, or scored the prompt; None before that."""
        return self.sequence.version or self.sequence.scored_under

    def runs(self, count: int) -> list[tuple[Version, int]]:
        """Whose the first ``count`` tokens are: each version in its turn, and how many it drew."""
        stamps = [stamp for stamp in list(self.sequence.stamps) if stamp[0] < count]
        ends = [*(start for start, _ in stamps[1:]), count]  # of no token there is no stamp
        return [(version, end - start) for (start, version), end in zip(stamps, ends, strict=False)]

    @property
    def queue_seconds(self) -> float:
        """How long it waited for a seat, by the engine's clock; 0 while it waits."""
        return max(0.0, self.sequence.seated - self.sequence.arrived)

    def routed(self, first: int = 0) -> Array | None:
        """The experts [tokens, L, x] of prompt and response from token ``first`` on, once it has ended.

        The last token was never computed and is left out. None where experts are not recorded.
        """
        routed = self.sequence.routed(self._none_expert, first)
        return None if routed is None else routed[:-1]

    # -- the engine's side ------------------------------------------------------------------

    def tell(self) -> bool:
        """Wake whoever waits for more, if there is any; true when nobody waits now."""
        if self._outcome is not None or len(self.sequence.logprobs) > self._read:
            _tell(self._for_more)
        return not self._for_more

    def settle(self, error: Exception | None = None) -> None:
        """It has ended."""
        if self._outcome is None:
            self._outcome = error or self.sequence.failure or self.sequence.completion(self._none_expert)
            _tell(self._for_all)
            self.tell()


async def _told(waiting: list[asyncio.Future[None]]) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    waiting.append(future)
    await future


def _tell(waiting: list[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)
    waiting.clear()
