"""Held-out scores: what is measured, and that measuring again gives the same."""

import asyncio
from itertools import combinations
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.tiny import Echo

from miles.core.errors import HookError
from miles.core.protocols import SamplingParams
from miles.core.types import Prompt, Reward
from miles.rollout.evaluate import Evaluator, estimate_pass_at_k
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.mixture import build_builtin_reward
from miles.rollout.seeds import make_eval_seed_fn

PROMPTS = [Prompt(id=i, messages=({"role": "user", "content": f"{i}+1="},), label="7") for i in range(5)]


def evaluator(tokenizer, sets, *, group_size=4, max_new_tokens=9, reward=None, **kw) -> Evaluator:
    engine = Echo(tokenizer.encode, lambda seed: str(seed % 3 + 6), end=tokenizer.eos_token_id)
    return Evaluator(
        sets,
        engine=engine,
        generate=SingleTurn(PromptRenderer(tokenizer, chat=False), tokenizer.text),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
        group_size=group_size,
        seed=42,
        reward=reward or build_builtin_reward("int", GraderContext(seed=0)),
        **kw,
    )


def test_every_set_is_measured_by_name(tokenizer):
    found = asyncio.run(evaluator(tokenizer, {"easy": PROMPTS, "hard": PROMPTS[:2]})())
    for name, prompts in (("easy", PROMPTS), ("hard", PROMPTS[:2])):
        of = make_eval_seed_fn(42, name)
        right = [of(p, i) % 3 == 1 for p in prompts for i in range(4)]
        assert found[f"eval/{name}/reward"] == pytest.approx(sum(right) / len(right))
        means = [fmean(right[start : start + 4]) for start in range(0, len(right), 4)]
        assert found[f"eval/{name}/reward_stderr"] == pytest.approx(stdev(means) / len(means) ** 0.5)
        assert found[f"eval/{name}/response_length"] == 2.0
        assert found[f"eval/{name}/truncated"] == 0.0
    assert found["eval/easy/unscored"] == 0.0
    assert len(found) == 10


def test_measuring_again_gives_the_same(tokenizer):
    measure = evaluator(tokenizer, {"easy": PROMPTS})
    assert asyncio.run(measure()) == asyncio.run(measure())


def test_trajectories_cut_at_the_limit_are_counted(tokenizer):
    assert asyncio.run(evaluator(tokenizer, {"easy": PROMPTS}, max_new_tokens=1)())["eval/easy/truncated"] == 1.0


def test_pass_rates_grow_with_the_trajectories(tokenizer):
    found = asyncio.run(evaluator(tokenizer, {"easy": PROMPTS}, group_size=6, log_passrate=True)())
    rates = [found[f"eval/easy/pass@{k}"] for k in (1, 2, 4)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(found["eval/easy/reward"])
    assert "eval/easy/pass@8" not in found


def test_one_trajectory_has_no_pass_rate(tokenizer):
    found = asyncio.run(evaluator(tokenizer, {"easy": PROMPTS}, group_size=1, log_passrate=True)())
    assert not any("pass@" in name for name in found)


def test_an_error_in_evaluation_is_raised_bare(tokenizer):
    async def reward(prompt, trajectory):
        raise HookError("no judge")

    with pytest.raises(HookError, match="no judge"):
        asyncio.run(evaluator(tokenizer, {"easy": PROMPTS}, reward=reward)())


def test_trajectories_that_nothing_could_score_are_counted(tokenizer):
    async def reward(prompt, trajectory):
        if prompt.id == PROMPTS[0].id:
            raise ZeroDivisionError("no judge")
        return Reward(value=1.0)

    found = asyncio.run(evaluator(tokenizer, {"easy": PROMPTS[:2]}, reward=reward)())
    assert (found["eval/easy/unscored"], found["eval/easy/reward"]) == (0.5, 0.5)


@given(data=st.data(), trajectories=st.integers(1, 7))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(data, trajectories):
    passed = data.draw(st.integers(0, trajectories))
    k = data.draw(st.integers(1, trajectories))
    draws = list(combinations([True] * passed + [False] * (trajectories - passed), k))
    assert estimate_pass_at_k(k, trajectories, passed) == pytest.approx(sum(map(any, draws)) / len(draws))
