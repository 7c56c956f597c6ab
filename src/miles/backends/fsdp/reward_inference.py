"""Batched reward-model inference: concurrent requests are scored in one forward.

    request ---> queue ---> as many as fit one forward ---> scores ---> response

While one forward runs the next batch accumulates; there is no batching delay.

``_T`` packed input tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import torch

from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster.executor import Executor


class BatchedScorer:
    """Scores token sequences with ``model``, at most ``most`` tokens at once unless a single sequence has more."""

    def __init__(self, model: RewardModel, *, run: Executor, most: int = 16384) -> None:
        self._model = model
        self._run = run
        self._most = most
        self._queue: deque[tuple[Sequence[int], asyncio.Future[float]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def scores(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each sequence; none may be empty."""
        loop = asyncio.get_running_loop()
        requests = [(sequence, loop.create_future()) for sequence in sequences]
        self._queue += requests
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._serve())
        return [await future for _, future in requests]

    async def close(self) -> None:
        """Stop scoring; pending requests are cancelled."""
        if self._task is not None:
            self._task.cancel()
        for _, future in self._queue:
            future.cancel()
        self._queue.clear()

    async def _serve(self) -> None:
        while self._queue:
            batch, capacity = [self._queue.popleft()], self._most
            capacity -= len(batch[0][0])
            while self._queue and len(self._queue[0][0]) <= capacity:
                batch.append(self._queue.popleft())
                capacity -= len(batch[-1][0])
            pending = [(sequence, future) for sequence, future in batch if not future.done()]
            if pending:
                await self._score_batch(pending)

    async def _score_batch(self, pending: Sequence[tuple[Sequence[int], asyncio.Future[float]]]) -> None:
        try:
            scores = await self._run(lambda: self._forward([sequence for sequence, _ in pending]))
        except Exception as error:  # every pending request receives the error
            for _, future in pending:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), score in zip(pending, scores, strict=True):
            if not future.done():
                future.set_result(score)

    @torch.no_grad()
    def _forward(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        lengths, device = [len(sequence) for sequence in sequences], self._model.device
        tokens_T = torch.tensor([token for sequence in sequences for token in sequence], device=device)
        positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
        return self._model.scores(tokens_T, positions_T, lengths).tolist()
