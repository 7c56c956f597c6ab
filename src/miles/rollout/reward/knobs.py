"""From the knobs to the means of a run's graders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from miles.core.errors import UsageError
from miles.core.protocols import RewardFn
from miles.rollout.config import RolloutConfig
from miles.rollout.reward.means import RUBRIC, JudgeServer, Means, ModelServer, Server, TokensOf
from miles.rollout.reward.workers import Workers


def means_of(config: RolloutConfig, *, environ: Mapping[str, str], tokens_of: Callable[[str], TokensOf]) -> Means:
    """What the knobs say. Tokens are looked up in ``environ``; ``tokens_of`` loads a checkpoint's chat template."""
    remote = _server(config, config.rm_url, "--rm-token-env", config.rm_token_env, environ)
    model = _server(config, config.reward_model_url, "--reward-model-token-env", config.reward_model_token_env, environ)
    judge = _server(config, config.judge_url, "--judge-token-env", config.judge_token_env, environ)
    tokenizer = config.reward_model_tokenizer
    return Means(
        seed=config.rollout_seed,
        workers=Workers(config.grade_workers, seconds=config.grade_timeout),
        remote=remote,
        model=model
        and ModelServer(
            server=model,
            model=config.reward_model_name,
            api=config.reward_model_api,
            tokens_of=None if tokenizer is None else tokens_of(tokenizer),
        ),
        judge=judge
        and JudgeServer(
            server=judge,
            model=config.judge_model or "",
            rubric=config.judge_rubric or RUBRIC,
            max_tokens=config.judge_max_tokens,
        ),
        code=lambda: _code(config),
        reward_key=config.reward_key,
    )


def _code(config: RolloutConfig) -> RewardFn:
    """Made only for whom it is: it looks at once whether this machine can hold a sandbox."""
    from miles.rollout.reward.code import CodeReward, code_limits

    return CodeReward(code_limits(config), config.allow_unsandboxed_code, concurrency=config.code_concurrency)


def _server(
    config: RolloutConfig, url: str | None, flag: str, variable: str | None, environ: Mapping[str, str]
) -> Server | None:
    if url is None:
        return None
    if variable is not None and not environ.get(variable):
        raise UsageError(f"{flag} {variable}: there is no such environment variable, or it is empty; set it.")
    return Server(
        url=url,
        token=None if variable is None else environ[variable],
        retries=config.rm_retries,
        concurrency=config.rm_concurrency,
        seconds=config.rm_request_timeout,
        batch=config.rm_batch_size,
    )
