"""Build the grader context of a run from its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from miles.core.errors import UsageError
from miles.core.protocols import RewardFn
from miles.rollout.config import RolloutConfig
from miles.rollout.reward.context import (
    DEFAULT_RUBRIC,
    GraderContext,
    HTTPEndpoint,
    JudgeEndpoint,
    RenderTokens,
    RewardModelEndpoint,
)
from miles.rollout.reward.grader_pool import GraderPool
from miles.rollout.sandbox.build import build_sandbox, sandbox_limits_from_config
from miles.rollout.sandbox.run import CodeSandbox


def build_grader_context(
    config: RolloutConfig,
    *,
    environ: Mapping[str, str],
    render_tokens: Callable[[str], RenderTokens],
    sandbox: Callable[[], CodeSandbox] | None = None,
) -> GraderContext:
    """Build the context. Secrets are read from ``environ``; ``render_tokens`` loads a checkpoint's chat template.

    ``sandbox`` gives the one that the tools of this process use too, so that --code-concurrency counts both.
    """
    remote = _build_endpoint(config, config.rm_url, "--rm-token-env", config.rm_token_env, environ)
    model = _build_endpoint(
        config, config.reward_model_url, "--reward-model-token-env", config.reward_model_token_env, environ
    )
    judge = _build_endpoint(config, config.judge_url, "--judge-token-env", config.judge_token_env, environ)
    tokenizer = config.reward_model_tokenizer
    return GraderContext(
        seed=config.rollout_seed,
        pool=GraderPool(config.grade_workers, seconds=config.grade_timeout),
        remote=remote,
        model=model
        and RewardModelEndpoint(
            server=model,
            model=config.reward_model_name,
            api=config.reward_model_api,
            render_tokens=None if tokenizer is None else render_tokens(tokenizer),
        ),
        judge=judge
        and JudgeEndpoint(
            server=judge,
            model=config.judge_model or "",
            rubric=config.judge_rubric or DEFAULT_RUBRIC,
            max_tokens=config.judge_max_tokens,
        ),
        code=lambda: _build_code_reward(config, sandbox or partial(build_sandbox, config)),
        reward_key=config.reward_key,
    )


def _build_code_reward(config: RolloutConfig, sandbox: Callable[[], CodeSandbox]) -> RewardFn:
    """Created only when used, since it probes the sandbox at once."""
    from miles.rollout.reward.code import CodeReward

    return CodeReward(sandbox_limits_from_config(config), sandbox())


def _build_endpoint(
    config: RolloutConfig, url: str | None, flag: str, variable: str | None, environ: Mapping[str, str]
) -> HTTPEndpoint | None:
    if url is None:
        return None
    if variable is not None and not environ.get(variable):
        raise UsageError(f"{flag} {variable}: there is no such environment variable, or it is empty; set it.")
    return HTTPEndpoint(
        url=url,
        token=None if variable is None else environ[variable],
        retries=config.rm_retries,
        concurrency=config.rm_concurrency,
        seconds=config.rm_request_timeout,
        batch=config.rm_batch_size,
    )
