"""Reasoning Gym's questions as a world: a reply is scored by the task's own scorer, and may be tried again."""

from __future__ import annotations

from functools import cache
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt
from miles.rollout.reward.score import BadLabel, GradingError
from miles.rollout.reward.workers import Workers
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_GRADE = "miles.rollout.reward.gym:grade"
_AGAIN = "That is not right yet. Look at it again, and answer once more."


class ReasoningGym:
    """The prompt's metadata is an entry, as ``reasoning_gym:task`` data has it (see rollout.generated).

    The last of ``tries`` counts, and each wrong one before it costs ``price`` of the reward.
    """

    def __init__(
        self, *, tries: int = 1, price: float = 0.0, right: float = 1.0, workers: Workers | None = None
    ) -> None:
        package("reasoning_gym", environment="reasoning_gym", install="miles-rl[graders]")
        self._left = tries
        self._price = price
        self._right = right
        self._lost = 0.0
        self._workers = workers or _shared()
        self._prompt: Prompt | None = None

    async def open(self, prompt: Prompt) -> Opening:
        self._prompt = prompt
        return Opening(messages=prompt.messages, scores=True)

    async def step(self, reply: Message) -> Step:
        assert self._prompt is not None
        self._left -= 1
        score = await self._score(self._prompt, str(reply.get("content") or ""))
        if score >= self._right or self._left == 0:
            return Step(reward=score - self._lost, parts={"right": float(score >= self._right)}, done=True)
        self._lost += self._price
        return Step(messages=[{"role": "user", "content": _AGAIN}])

    async def close(self) -> None:
        return

    async def _score(self, prompt: Prompt, reply: str) -> float:
        metadata: dict[str, Any] = dict(prompt.metadata)
        try:
            return float(await self._workers.call(_GRADE, reply, prompt.label or "", metadata))
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by reasoning_gym: {error}.") from error
        except GradingError as error:
            raise EnvironmentFailed(str(error)) from error


@cache
def _shared() -> Workers:
    """Processes that all attempts share, since starting one takes longer than most answers do."""
    return Workers()
