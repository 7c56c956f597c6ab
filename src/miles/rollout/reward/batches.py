"""Questions that come one by one, asked several at a time: what waits while the server is busy goes together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from miles.rollout.reward.score import GradingError, Refused

Ask = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class Batches:
    """Gathers questions into calls of ``ask`` with at most ``size`` each, at most ``concurrency`` calls at once.

    The first question is asked at once. No clock decides how long to wait for company: it is whoever
    came while all calls were under way.
    """

    def __init__(self, ask: Ask, *, size: int, concurrency: int) -> None:
        self._ask = ask
        self._size = size
        self._concurrency = concurrency
        self._waiting: deque[tuple[Any, asyncio.Future[Any]]] = deque()
        self._calls: set[asyncio.Task[None]] = set()

    async def put(self, question: Any) -> Any:
        """The answer to one question."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if len(self._calls) < self._concurrency:
            call = asyncio.create_task(self._serve())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        return await answer

    async def _serve(self) -> None:
        """Ask batch after batch until nobody waits."""
        await asyncio.sleep(0)  # those who are about to ask in this turn of the loop come along
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            asked = [(question, answer) for question, answer in taken if not answer.done()]
            if asked:
                await self._answer(asked)

    async def _answer(self, asked: Sequence[tuple[Any, asyncio.Future[Any]]]) -> None:
        try:
            answers = await self._ask([question for question, _ in asked])
            if len(answers) != len(asked):
                raise GradingError(f"the server gave {len(answers)} answers for {len(asked)} attempts")
        except Refused as error:
            if len(asked) == 1:
                _tell(asked, error)
            else:  # one of them may be the reason; it shall not take the others with it
                for one in asked:
                    await self._answer([one])
            return
        except Exception as error:  # whatever it is, those who wait are told
            _tell(asked, error)
            return
        for (_, waiting), answer in zip(asked, answers, strict=True):
            if not waiting.done():
                waiting.set_result(answer)


def _tell(asked: Sequence[tuple[Any, asyncio.Future[Any]]], error: Exception) -> None:
    for _, waiting in asked:
        if not waiting.done():
            waiting.set_exception(error)
