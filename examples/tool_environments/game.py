"""A game of guessing: say a digit, hear whether the hidden one is higher or lower, in a handful of tries."""

from __future__ import annotations

from miles.core.types import Prompt
from miles.rollout.tools.environment import OpenResult, StepResult
from miles.rollout.tools.tool import Message


class Guess:
    """An environment (see docs/tools.md). The sooner the number is found, the more it is worth."""

    def __init__(self, tries: int = 5) -> None:
        self._tries, self._left = tries, tries
        self._number = 0

    async def open(self, prompt: Prompt) -> OpenResult:
        self._number = int(prompt.label or 0)
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        said = str(reply["content"]).strip()
        self._left -= 1
        if said == str(self._number):
            return StepResult(reward=(self._left + 1) / self._tries, done=True)
        if not said.isdigit() or not self._left:
            return StepResult(reward=0.0, done=True)
        word = "higher" if int(said) < self._number else "lower"
        return StepResult(messages=[{"role": "user", "content": word}])

    async def close(self) -> None:
        return
