"""A teacher that is served: asked for many trajectories at once, and believed only about the tokens it was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.core.errors import EngineError
from miles.rollout.reward.batches import Batches
from miles.rollout.reward.http import Client
from miles.rollout.reward.means import Server
from miles.rollout.reward.score import GradingError, Refused
from miles.rollout.teach.wire import Said, Wish, body_of, said_of

LONGEST_ANSWER = 256 << 20  # bytes


class Teacher:
    """Scores tokens at ``temperature``. What it cannot be asked, or answers wrongly, ends the run in one sentence.

    ``server.url`` is the engine's address, with or without ``/generate``. Questions that come while as many requests as
    ``server.concurrency`` are under way go together, ``server.batch`` at most.
    """

    def __init__(self, name: str, server: Server, *, temperature: float = 1.0) -> None:
        self.name = name
        self.url = server.url.rstrip("/").removesuffix("/generate")
        self.temperature = temperature
        self.client = Client(server, url=self.url, longest=LONGEST_ANSWER)
        self._server = server
        self._draw = 0
        self._batches = Batches(self._ask, size=server.batch, concurrency=server.concurrency)

    async def score(self, wish: Wish) -> Said:
        """What it says of the tokens of a wish."""
        try:
            return await self._batches.put(wish)
        except GradingError as error:
            raise EngineError(
                f"the teacher {self.name} did not score an attempt: {error}; see that it runs and serves SGLang's "
                "/generate, or give it longer with --opd-teacher-timeout."
            ) from error

    async def try_out(self, wish: Wish, temperature: float) -> Said:
        """Have one wish scored at another temperature, before anything depends on it; raises ``GradingError``.

        A server that will not have a request that draws nothing is asked to draw a token from then on.
        """
        try:
            (said,) = await self._post([wish], temperature)
        except Refused:
            if self._draw:
                raise
            self._draw = 1
            (said,) = await self._post([wish], temperature)
        return said

    async def _ask(self, wishes: Sequence[Wish]) -> Sequence[Said]:
        return await self._post(wishes, self.temperature)

    async def _post(self, wishes: Sequence[Wish], temperature: float) -> list[Said]:
        answers: Any = await self.client.post("/generate", body_of(wishes, temperature=temperature, draw=self._draw))
        if not isinstance(answers, list) or len(answers) != len(wishes):
            raise GradingError(f"{self.url}/generate did not answer {len(wishes)} prompts with as many answers")
        return [said_of(wish, answer) for wish, answer in zip(wishes, answers, strict=True)]
