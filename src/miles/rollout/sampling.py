"""How tokens are drawn in training and in evaluation, and how long a context may be, as the knobs say."""

from miles.core.protocols import Sampling
from miles.rollout.config import RolloutConfig


def training_sampling(config: RolloutConfig) -> Sampling:
    """The sampling of training attempts; the producer sets each attempt's seed."""
    return Sampling(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_new_tokens=config.rollout_max_response_len,
        stop=config.rollout_stop,
        stop_token_ids=config.rollout_stop_token_ids,
    )


def evaluation_sampling(config: RolloutConfig) -> Sampling:
    """The sampling of evaluation attempts: training's, where evaluation has no wish of its own."""
    return Sampling(
        temperature=_first(config.eval_temperature, config.rollout_temperature),
        top_p=_first(config.eval_top_p, config.rollout_top_p),
        top_k=int(_first(config.eval_top_k, config.rollout_top_k)),
        max_new_tokens=int(_first(config.eval_max_response_len, config.rollout_max_response_len)),
        stop=config.rollout_stop,
        stop_token_ids=config.rollout_stop_token_ids,
    )


def context_limit(config: RolloutConfig, positions: int) -> int:
    """Most tokens of prompt and attempt together, for a model of so many positions."""
    wish = config.rollout_max_context_len
    return positions if wish is None else min(wish, positions)


def prompt_limit(config: RolloutConfig) -> int | None:
    """Most tokens a prompt may have so that there is room for an attempt; None when no knob sets one."""
    context = config.rollout_max_context_len
    limits = (config.rollout_max_prompt_len, None if context is None else context - 1)
    return min((limit for limit in limits if limit is not None), default=None)


def _first(wish: float | None, otherwise: float) -> float:
    return otherwise if wish is None else wish
