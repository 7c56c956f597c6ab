"""From a prompt to a scored group."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.rollout.tiny import Echo

from miles.core.errors import DataError, PlugError
from miles.core.protocols import Sampling
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.filters import check_reward_nonzero_std, keep_all, nonzero_std
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.produce import Producer
from miles.rollout.render import Renderer
from miles.rollout.reward.chosen import builtin_reward
from miles.rollout.reward.means import Means
from miles.rollout.seeds import training_seeds

QUESTION = Prompt(id=11, messages=({"role": "user", "content": "3+4="},), label="7", epoch=2)
SAMPLING = Sampling(max_new_tokens=20, temperature=0.7)


def producer(tokenizer, *, words=lambda seed: str(seed % 3 + 6), generate=None, attempts=8, **kw) -> Producer:
    engine = Echo(tokenizer.encode, words, end=tokenizer.eos_token_id)
    generate = generate or SingleTurn(Renderer(tokenizer, chat=False), tokenizer.text)
    return Producer(
        engine=engine, generate=generate, sampling=SAMPLING, attempts=attempts, seed_of=training_seeds(42), **kw
    )


def produce(maker: Producer, prompt: Prompt = QUESTION) -> Group:
    return asyncio.run(maker.produce(prompt))


def ended(status: Status, **kw) -> Trajectory:
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    return Trajectory(branches=((asked,),), status=status, **kw)


async def one_point(prompt, trajectory):
    return Reward(value=1.0, parts={"form": 0.25})


def test_a_group_holds_every_attempt_in_order_with_its_own_seed_and_score(tokenizer):
    group = produce(producer(tokenizer, reward=builtin_reward("int", Means(seed=0))))
    seeds = [training_seeds(42)(QUESTION, i) for i in range(8)]
    assert [t.index for t in group.trajectories] == list(range(8))
    assert [t.metadata["text"] for t in group.trajectories] == [str(seed % 3 + 6) for seed in seeds]
    assert group.rewards == [float(seed % 3 == 1) for seed in seeds]
    assert group.prompt is QUESTION


def test_a_group_depends_on_nothing_but_its_prompt(tokenizer):
    maker = producer(tokenizer, reward=builtin_reward("int", Means(seed=0)))

    async def together():
        others = [maker.produce(replace(QUESTION, id=i)) for i in range(5)]
        return (await asyncio.gather(*others, maker.produce(QUESTION)))[-1]

    alone, crowded = produce(maker), asyncio.run(together())
    assert [t.metadata for t in alone.trajectories] == [t.metadata for t in crowded.trajectories]
    again = produce(maker, replace(QUESTION, epoch=3))
    assert [t.metadata for t in alone.trajectories] != [t.metadata for t in again.trajectories]


def test_the_first_error_is_raised_bare_and_ends_the_siblings(tokenizer):
    cancelled = []

    async def generate(prompt, engine, sampling):
        if sampling.seed == training_seeds(42)(prompt, 3):
            raise KeyError("the tool is gone") from OSError("cable")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(sampling.seed)
            raise

    with pytest.raises(KeyError, match="the tool is gone") as caught:
        produce(producer(tokenizer, generate=generate, reward=one_point))
    assert isinstance(caught.value.__cause__, OSError)
    assert len(cancelled) == 7


def test_a_reward_that_raises_costs_its_attempt_the_score_and_nothing_else(tokenizer):
    async def reward(prompt, trajectory):
        if trajectory.index == 3:
            raise ZeroDivisionError("no judge")
        return Reward(value=1.0)

    group = produce(producer(tokenizer, reward=reward))
    assert group.rewards == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    assert group.trajectories[3].metadata["unscored"] == "ZeroDivisionError: no judge"
    assert sum("unscored" in t.metadata for t in group.trajectories) == 1


def test_a_reward_that_hangs_is_given_up(tokenizer):
    async def reward(prompt, trajectory):
        await asyncio.Event().wait()

    group = produce(producer(tokenizer, reward=reward, attempts=2, reward_seconds=0.01))
    assert group.rewards == [0.0, 0.0]
    assert group.trajectories[0].metadata["unscored"] == "no reward within 0.01 s"


def test_a_time_limit_of_the_reward_s_own_is_told_as_its_own(tokenizer):
    async def reward(prompt, trajectory):
        raise TimeoutError("the tool")

    (one,) = produce(producer(tokenizer, reward=reward, attempts=1)).trajectories
    assert one.metadata["unscored"] == "TimeoutError: the tool"


def test_an_error_meant_for_the_user_stops_the_run_all_the_same(tokenizer):
    with pytest.raises(DataError, match="Prompt 11 has no label"):
        produce(producer(tokenizer, reward=builtin_reward("int", Means())), replace(QUESTION, label=None))


def test_a_reward_that_always_fails_stops_the_run_with_its_reason(tokenizer):
    async def reward(prompt, trajectory):
        raise ZeroDivisionError("no judge")

    maker = producer(tokenizer, reward=reward, attempts=4, most_unscored=10)
    assert produce(maker).rewards == produce(maker).rewards == [0.0] * 4
    with pytest.raises(
        PlugError, match=r"failed for 10 attempts in a row, .*prompt 11 \(ZeroDivisionError: no judge\)"
    ):
        produce(maker)


def test_one_success_forgives_the_failures_before_it(tokenizer):
    async def reward(prompt, trajectory):
        if trajectory.index:
            raise ZeroDivisionError("no judge")
        return Reward(value=1.0)

    maker = producer(tokenizer, reward=reward, attempts=3, most_unscored=4)
    assert [produce(maker).rewards for _ in range(5)] == [[1.0, 0.0, 0.0]] * 5


def test_a_group_reward_that_fails_leaves_its_group_unscored(tokenizer):
    async def rank(prompt, trajectories):
        raise KeyError("judge")

    group = produce(producer(tokenizer, group_reward=rank, attempts=3))
    assert group.rewards == [0.0] * 3
    assert {t.metadata["unscored"] for t in group.trajectories} == {"KeyError: 'judge'"}
    with pytest.raises(PlugError, match="failed for 3 attempts in a row"):
        produce(producer(tokenizer, group_reward=rank, attempts=3, most_unscored=3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_the_prompt(tokenizer, value):
    async def reward(prompt, trajectory):
        return Reward(value=value)

    with pytest.raises(PlugError, match=r"The reward of prompt 11 is .*finite"):
        produce(producer(tokenizer, reward=reward))


def test_a_reward_that_is_a_bare_number_says_what_to_return(tokenizer):
    async def reward(prompt, trajectory):
        return 1.0

    with pytest.raises(PlugError, match=r"prompt 11 is a float; return miles\.core\.types\.Reward"):
        produce(producer(tokenizer, reward=reward))


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_an_attempt_that_did_not_end_by_itself_earns_nothing_unseen(tokenizer, status):
    async def generate(prompt, engine, sampling):
        return ended(status, metadata={"text": "half"})

    async def reward(prompt, trajectory):
        pytest.fail("scored")

    group = produce(producer(tokenizer, generate=generate, reward=reward, attempts=2))
    assert group.rewards == [0.0, 0.0]
    assert group.trajectories[0].metadata == {"text": "half", "unscored": str(status)}


def test_an_environment_may_score_as_it_goes(tokenizer):
    async def generate(prompt, engine, sampling):
        return ended(Status.COMPLETED, reward=Reward(value=0.5))

    assert produce(producer(tokenizer, generate=generate, attempts=2)).rewards == [0.5, 0.5]
    assert produce(producer(tokenizer, generate=generate, attempts=2, reward=one_point)).rewards == [0.5, 0.5]


def test_an_attempt_that_nothing_scores_is_an_error(tokenizer):
    with pytest.raises(PlugError, match=r"Nothing scores the attempts at prompt 11; .*--rm-type"):
        produce(producer(tokenizer))


def test_the_reward_key_chooses_the_part_to_train_on(tokenizer):
    group = produce(producer(tokenizer, reward=one_point, reward_key="form", attempts=2))
    assert group.rewards == [0.25, 0.25]
    assert group.trajectories[0].reward == Reward(value=0.25, parts={"form": 0.25})
    with pytest.raises(PlugError, match=r"prompt 11 has no part shape \(found: form\)"):
        produce(producer(tokenizer, reward=one_point, reward_key="shape"))


def test_a_group_reward_sees_all_attempts_in_order(tokenizer):
    async def rank(prompt, trajectories):
        best = max(int(t.metadata["text"]) for t in trajectories)
        return [Reward(value=float(int(t.metadata["text"]) == best)) for t in trajectories]

    group = produce(producer(tokenizer, group_reward=rank))
    said = [int(t.metadata["text"]) for t in group.trajectories]
    assert group.rewards == [float(n == max(said)) for n in said]


def test_a_group_reward_must_score_every_attempt(tokenizer):
    async def some(prompt, trajectories):
        return [Reward(value=1.0)]

    with pytest.raises(PlugError, match="gave 1 rewards for the 8 attempts at prompt 11"):
        produce(producer(tokenizer, group_reward=some))


def scored(*rewards: float) -> Group:
    return Group(prompt=QUESTION, trajectories=tuple(ended(Status.COMPLETED, reward=Reward(value=r)) for r in rewards))


def test_filters_keep_what_can_be_learned_from():
    assert keep_all(scored(1.0, 1.0)).keep
    assert nonzero_std(scored(0.0, 1.0)).keep
    assert (nonzero_std(scored(1.0, 1.0)).keep, nonzero_std(scored(1.0, 1.0)).reason) == (False, "zero_std_1")
    assert nonzero_std(scored(0.0, 0.0, 0.0)).reason == "zero_std_0"
    assert nonzero_std(scored(0.25)).reason == "zero_std_0.2"
    assert check_reward_nonzero_std is nonzero_std
