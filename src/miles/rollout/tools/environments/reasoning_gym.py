"""Reasoning Gym tasks as an environment: a reply is scored by the task's scorer, and may be retried."""

from __future__ import annotations

from functools import cache
from typing import Any

from miles.core.errors import DataError
from miles.core.types import Prompt
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.reward.types import BadLabel, GradingError
from miles.rollout.tools.environment import OpenResult, StepResult, import_package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_GRADE = "miles.rollout.reward.reasoning_gym:grade"
_AGAIN = "That is not right yet. Look at it again, and answer once more."


class ReasoningGym:
    """The prompt's metadata is an entry, as ``reasoning_gym:task`` data has it (see data.procedural).

    The last of ``tries`` counts, and each wrong one before it costs ``price`` of the reward.
    """

    def __init__(
        self, *, tries: int = 1, price: float = 0.0, right: float = 1.0, pool: GraderPool | None = None
    ) -> None:
        import_package("reasoning_gym", environment="reasoning_gym", install="miles-rl[graders]")
        self._tries_left = tries
        self._price = price
        self._threshold = right
        self._penalty = 0.0
        self._pool = pool or _shared_pool()
        self._prompt: Prompt | None = None

    async def open(self, prompt: Prompt) -> OpenResult:
        self._prompt = prompt
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        assert self._prompt is not None
        self._tries_left -= 1
        score = await self._score(self._prompt, str(reply.get("content") or ""))
        if score >= self._threshold or self._tries_left == 0:
            return StepResult(reward=score - self._penalty, parts={"right": float(score >= self._threshold)}, done=True)
        self._penalty += self._price
        return StepResult(messages=[{"role": "user", "content": _AGAIN}])

    async def close(self) -> None:
        return

    async def _score(self, prompt: Prompt, reply: str) -> float:
        metadata: dict[str, Any] = dict(prompt.metadata)
        try:
            return float(await self._pool.call(_GRADE, reply, prompt.label or "", metadata))
        except BadLabel as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by reasoning_gym: {error}.") from error
        except GradingError as error:
            raise EnvironmentFailed(str(error)) from error


@cache
def _shared_pool() -> GraderPool:
    """Grader processes shared by all trajectories, since starting one takes longer than most grades."""
    return GraderPool()
