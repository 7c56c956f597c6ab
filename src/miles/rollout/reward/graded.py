"""From a name in the table to a core.protocols.RewardFn."""

from __future__ import annotations

from miles.core.errors import DataError, PlugError
from miles.core.protocols import RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.table import RANDOM, UNLABELLED, grade_of
from miles.rollout.seeds import Stream, mix


def builtin_reward(name: str, *, seed: int) -> RewardFn:
    """The reward called ``name`` in the table; ``seed`` is for the random one alone."""
    return RandomReward(seed) if name == RANDOM else Graded(name)


class Graded:
    """Grades the text of the reply (``trajectory.metadata["text"]``) against the prompt's label."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._grade = grade_of(name)

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        reply = trajectory.metadata.get("text")
        if reply is None:
            raise PlugError(
                f"The {self._name} reward grades text, and the generate function left none in metadata['text']; "
                "put the reply there or use --custom-rm-path."
            )
        if prompt.label is None and self._name not in UNLABELLED:
            raise DataError(f"Prompt {prompt.id} has no label to grade by; name its column with --label-key.")
        try:
            return Reward(value=self._grade(reply, prompt.label or ""))
        except ValueError as error:
            raise DataError(f"Prompt {prompt.id} cannot be graded by {self._name}: {error}.") from error


class RandomReward:
    """0 or 1 by chance, as a pure function of (seed, prompt, epoch, attempt): a control that nothing can learn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=float(mix(Stream.REWARD, self._seed, prompt.id, prompt.epoch, trajectory.index) & 1))
