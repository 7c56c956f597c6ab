"""Rewards that are computed by a crew of workers, on this machine or on the nodes of the cluster a run was placed on.

attempt --> question (bytes) --> worker: the reward that the run's own process would have asked
        <-- answer: a reward, why there is none, or an error that ends the run
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from miles.cluster.crew.asked import Crew, Home, Hopeless, Lost
from miles.cluster.crew.child import Answer
from miles.cluster.crew.near import Near, life_of
from miles.core import errors
from miles.core.errors import MilesError, PlugError
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.core.wire import NOUNS, Codec, WireError
from miles.launch.config import Config
from miles.launch.hosting import held
from miles.launch.rewards import rewards_of
from miles.rollout.reward.score import GradingError

CODEC = Codec(NOUNS)
# Seconds until a worker has imported all that its reward needs, on a machine that is busy.
_STARTING = 300.0
_LONGEST_REASON = 2000


def crew_of(config: Config, tell: Callable[[str], None]) -> Crew:
    """As many workers as --reward-num-workers says; none is started before it is asked."""
    r, cluster = config.rollout, held()
    names = (r.rm_token_env, r.reward_model_token_env, r.judge_token_env)
    secrets = {name: os.environ[name] for name in names if name is not None and name in os.environ}
    make = partial(answer_of, config)
    lives = [life_of(f"reward worker {i}", make, secrets) for i in range(r.reward_num_workers)]
    homes: list[Home]
    if cluster is None:
        homes = [Near(life, seconds=_STARTING) for life in lives]
    else:
        from miles.cluster.ray.workers import Far

        homes = [Far(life, number, cluster, seconds=_STARTING) for number, life in enumerate(lives)]
    return Crew(homes, most=r.reward_worker_concurrency, tell=tell)


class Asked:
    """Scores an attempt (see core.protocols.RewardFn) by asking the crew."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward:
        return (await _asked(self._crew, "one", prompt, (trajectory,)))[0]


class AskedTogether:
    """Scores all attempts at a prompt (see core.protocols.GroupRewardFn) by asking the crew."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]:
        return await _asked(self._crew, "group", prompt, tuple(trajectories))


def asked_rewards(
    config: Config, rewards: tuple[RewardFn | None, GroupRewardFn | None], logs: Path | None
) -> tuple[RewardFn | None, GroupRewardFn | None, Crew | None]:
    """The rewards of a run as they are, or, where it has workers, as the workers give them."""
    reward, group_reward = rewards
    if not config.rollout.reward_num_workers:
        return reward, group_reward, None
    crew = crew_of(config, partial(_noted, logs))
    if group_reward is not None:
        return None, AskedTogether(crew), crew
    return Asked(crew), None, crew


async def _asked(crew: Crew, verb: str, prompt: Prompt, trajectories: tuple[Trajectory, ...]) -> tuple[Reward, ...]:
    try:
        question = CODEC.pack(verb, (prompt, trajectories))
    except WireError as error:
        raise PlugError(
            f"an attempt at prompt {prompt.id} cannot go to the workers of --reward-num-workers: {error}."
        ) from error
    try:
        told, content = CODEC.unpack(await crew.ask(question))
    except Lost as error:
        raise GradingError(str(error)) from error
    except Hopeless as error:
        raise PlugError(f"rewards cannot be computed, for {error} (--reward-num-workers).") from error
    if told == "failed":
        raise GradingError(content)
    if told == "stop":
        kind, sentence = content
        raise _KINDS.get(kind, PlugError)(sentence)
    return content


_KINDS: dict[str, type[MilesError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, MilesError)
}


def _noted(logs: Path | None, sentence: str) -> None:
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        with (logs / "rewards.log").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {sentence}\n")


# -- in the worker ------------------------------------------------------------------------------


def answer_of(config: Config) -> Answer:
    """What a worker does: it asks the reward of the config, and puts into words what comes of it."""
    reward, group_reward = rewards_of(config)

    async def answer(question: bytes) -> bytes:
        verb, (prompt, trajectories) = CODEC.unpack(question)
        try:
            if verb == "group":
                assert group_reward is not None
                given = await group_reward(prompt, trajectories)
            else:
                assert reward is not None
                given = (await reward(prompt, trajectories[0]),)
            return CODEC.pack("scored", tuple(_plain(prompt, each) for each in given))
        except MilesError as error:
            return CODEC.pack("stop", (type(error).__name__, str(error)))
        except Exception as error:  # whatever a reward may raise is why there is none
            said = str(error) if isinstance(error, GradingError) else f"{type(error).__name__}: {error}"
            return CODEC.pack("failed", said[:_LONGEST_REASON])

    return answer


def _plain(prompt: Prompt, given: Any) -> Reward:
    """With numbers that travel; a plug is not type-checked before it runs."""
    if not isinstance(given, Reward):
        raise PlugError(
            f"The reward of prompt {prompt.id} is a {type(given).__name__}; return miles.core.types.Reward(value=...)."
        )
    return Reward(value=float(given.value), parts={str(name): float(part) for name, part in given.parts.items()})
