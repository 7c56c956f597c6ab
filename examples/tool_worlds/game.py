"""A game of guessing: say a digit, hear whether the hidden one is higher or lower, in a handful of tries."""

from __future__ import annotations

from miles.core.types import Prompt
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.tool import Message


class Guess:
    """An environment (see docs/tools.md). The sooner the number is found, the more it is worth."""

    def __init__(self, tries: int = 5) -> None:
        self._tries, self._left = tries, tries
        self._number = 0

    async def open(self, prompt: Prompt) -> Opening:
        self._number = int(prompt.label or 0)
        return Opening(messages=prompt.messages, scores=True)

    async def step(self, reply: Message) -> Step:
        said = str(reply["content"]).strip()
        self._left -= 1
        if said == str(self._number):
            return Step(reward=(self._left + 1) / self._tries, done=True)
        if not said.isdigit() or not self._left:
            return Step(reward=0.0, done=True)
        word = "higher" if int(said) < self._number else "lower"
        return Step(messages=[{"role": "user", "content": word}])

    async def close(self) -> None:
        return
