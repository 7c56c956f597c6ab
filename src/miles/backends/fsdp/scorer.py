"""A reward model at work: texts come one by one, and go through it together.

    asked ---> waiting ---> as many as fit one forward ---> scores ---> answered

While one forward runs the next gathers; no clock decides how long to wait for company.

``_T`` packed input tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import torch

from miles.cluster.local import Run
from miles.train.roles import ScoreModel


class Scorer:
    """Scores token sequences with ``model``, ``most`` tokens at once unless one sequence alone has more."""

    def __init__(self, model: ScoreModel, *, run: Run, most: int = 16384) -> None:
        self._model, self._run, self._most = model, run, most
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[float]]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """What each sequence is worth; none is empty."""
        loop = asyncio.get_running_loop()
        asked = [(sequence, loop.create_future()) for sequence in sequences]
        self._waiting += asked
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._serve())
        return [await answer for _, answer in asked]

    async def close(self) -> None:
        """End what is under way; who waits is told."""
        if self._work is not None:
            self._work.cancel()
        for _, answer in self._waiting:
            answer.cancel()
        self._waiting.clear()

    async def _serve(self) -> None:
        while self._waiting:
            taken, room = [self._waiting.popleft()], self._most
            room -= len(taken[0][0])
            while self._waiting and len(self._waiting[0][0]) <= room:
                taken.append(self._waiting.popleft())
                room -= len(taken[-1][0])
            wanted = [(sequence, answer) for sequence, answer in taken if not answer.done()]
            if wanted:
                await self._answer(wanted)

    async def _answer(self, wanted: Sequence[tuple[Sequence[int], asyncio.Future[float]]]) -> None:
        try:
            found = await self._run(lambda: self._forward([sequence for sequence, _ in wanted]))
        except Exception as error:  # whatever it is, those who wait are told
            for _, answer in wanted:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), score in zip(wanted, found, strict=True):
            if not answer.done():
                answer.set_result(score)

    @torch.no_grad()
    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        lengths, device = [len(sequence) for sequence in sequences], self._model.device
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return self._model.scores(tokens_T, positions_T, lengths).tolist()
