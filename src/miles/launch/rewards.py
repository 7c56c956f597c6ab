"""The reward the user chose: a plug, or built-in ones with the means they need."""

from __future__ import annotations

import os

from miles.algo.config import UNREWARDED
from miles.core.protocols import GroupRewardFn, RewardFn
from miles.core.types import Prompt, Reward, Trajectory
from miles.launch.config import Config
from miles.launch.upstream import upstream_of
from miles.models.tokenizer import load_tokenizer
from miles.plug import points
from miles.rollout.reward.chosen import builtin_group_reward, builtin_reward
from miles.rollout.reward.knobs import means_of
from miles.rollout.reward.means import TokensOf
from miles.rollout.reward.table import is_group


def rewards_of(config: Config) -> tuple[RewardFn | None, GroupRewardFn | None]:
    """The function that scores an attempt, or the one that scores a group; plugs are checked here."""
    r = config.rollout
    if r.custom_rm_path:
        if r.group_rm:
            return None, points.GROUP_REWARD.load(r.custom_rm_path, upstream_of(config))
        return points.REWARD.load(r.custom_rm_path, upstream_of(config)), None
    if r.rm_type is None:
        return _nothing if config.algo.advantage_estimator == UNREWARDED else None, None

    def tokens_of(folder: str) -> TokensOf:
        tokenizer = load_tokenizer(folder, config.models.trust_remote_code)
        return lambda messages: tokenizer.render(messages, add_generation_prompt=False)

    means = means_of(r, environ=os.environ, tokens_of=tokens_of)
    if r.group_rm or is_group(r.rm_type):
        return None, builtin_group_reward(r.rm_type, means)
    return builtin_reward(r.rm_type, means), None


async def _nothing(prompt: Prompt, trajectory: Trajectory) -> Reward:
    """What an attempt earns where a teacher alone is learned from and nobody asked for a score."""
    return Reward(value=0.0)
