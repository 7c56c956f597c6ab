"""Sampling parameters and length limits of training and evaluation, from the options."""

from dataclasses import replace

from miles.core.protocols import SamplingParams
from miles.rollout.config import RolloutConfig


def build_training_sampling(config: RolloutConfig) -> SamplingParams:
    """Sampling parameters of training; the rollout sets each trajectory's seed."""
    return SamplingParams(
        temperature=config.rollout_temperature,
        top_p=config.rollout_top_p,
        top_k=config.rollout_top_k,
        max_new_tokens=config.rollout_max_response_len,
        stop=config.rollout_stop,
        stop_token_ids=config.rollout_stop_token_ids,
    )


def build_eval_sampling(config: RolloutConfig) -> SamplingParams:
    """Sampling parameters of evaluation; unset ones are those of training."""
    return SamplingParams(
        temperature=_first_set(config.eval_temperature, config.rollout_temperature),
        top_p=_first_set(config.eval_top_p, config.rollout_top_p),
        top_k=int(_first_set(config.eval_top_k, config.rollout_top_k)),
        max_new_tokens=int(_first_set(config.eval_max_response_len, config.rollout_max_response_len)),
        stop=config.rollout_stop,
        stop_token_ids=config.rollout_stop_token_ids,
    )


def resolve_prompt_limit(config: RolloutConfig) -> int | None:
    """Maximum tokens of a prompt, leaving at least one for the response; None when no option sets one."""
    context = config.rollout_max_context_len
    limits = (config.rollout_max_prompt_len, None if context is None else context - 1)
    return min((limit for limit in limits if limit is not None), default=None)


def resolve_eval_prompt_limit(config: RolloutConfig) -> int | None:
    """Maximum tokens of a held-out prompt, as ``resolve_prompt_limit``."""
    return resolve_prompt_limit(
        replace(
            config,
            rollout_max_prompt_len=config.eval_max_prompt_len or config.rollout_max_prompt_len,
            rollout_max_context_len=config.eval_max_context_len or config.rollout_max_context_len,
        )
    )


def _first_set(limit: float | None, default: float) -> float:
    return default if limit is None else limit
