"""Rewards by chance: controls that show what a run does when there is nothing to learn."""

from __future__ import annotations

from hashlib import sha256

from miles.core.protocols import RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.rollout.reward.means import Means
from miles.rollout.reward.score import Metadata
from miles.rollout.seeds import Stream, mix


def deterministic_random(reply: str, label: str, metadata: Metadata) -> float:
    """0 or 1 by a hash of the reply: chance, but the same for the same text."""
    return float(sha256(reply.encode("utf-8", "surrogatepass")).digest()[0] & 1)


def random_reward(means: Means) -> RewardFn:
    """0 or 1 by chance, as a pure function of (seed, prompt, epoch, attempt)."""
    return _Random(means.seed)


class _Random:
    def __init__(self, seed: int) -> None:
        self._seed = seed

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return Reward(value=float(mix(Stream.REWARD, self._seed, prompt.id, prompt.epoch, trajectory.index) & 1))
