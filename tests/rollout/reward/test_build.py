"""From the knobs to what graders work with."""

import pytest

from miles.core.errors import UsageError
from miles.rollout.config import RolloutConfig
from miles.rollout.reward.build import build_grader_context
from miles.rollout.reward.context import DEFAULT_RUBRIC


def means(environ=None, **knobs):
    return build_grader_context(
        RolloutConfig(**knobs), environ=environ or {}, render_tokens=lambda folder: lambda messages: [len(folder)]
    )


def test_without_addresses_there_are_no_servers():
    bare = means(rollout_seed=9)
    assert (bare.seed, bare.remote, bare.model, bare.judge) == (9, None, None, None)


def test_a_token_comes_from_the_environment_by_name():
    given = means({"KEY": "s3cret", "OTHER": "no"}, rm_url="http://a/", rm_token_env="KEY", judge_url="http://b/v1")
    assert given.remote is not None and given.judge is not None
    assert (given.remote.token, given.judge.server.token) == ("s3cret", None)
    with pytest.raises(UsageError, match="--rm-token-env KEY: there is no such environment variable"):
        means(rm_url="http://a/", rm_token_env="KEY")


def test_servers_are_asked_as_the_knobs_say():
    given = means(
        reward_model_url="http://m", reward_model_api="openai", reward_model_name="s", reward_model_tokenizer="folder",
        rm_batch_size=8, rm_concurrency=4, rm_retries=0, rm_request_timeout=7.0,
        judge_url="http://j/v1", judge_model="big", judge_max_tokens=5,
    )  # fmt: skip
    assert given.model is not None and given.judge is not None and given.model.render_tokens is not None
    server = given.model.server
    assert (server.batch, server.concurrency, server.retries, server.seconds) == (8, 4, 0, 7.0)
    assert (given.model.api, given.model.model, given.model.render_tokens([])) == ("openai", "s", [6])
    assert (given.judge.model, given.judge.rubric, given.judge.max_tokens) == ("big", DEFAULT_RUBRIC, 5)
