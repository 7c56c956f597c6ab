"""From a prompt to a scored group."""

import asyncio
import math
from dataclasses import replace

import numpy as np
import pytest
from tests.rollout.tiny import Echo

from miles.core.errors import DataError, HookError
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Group, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.filters import check_reward_nonzero_std, drop_unscored, keep_all, nonzero_std
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.reward.context import GraderContext
from miles.rollout.reward.mixture import build_builtin_reward
from miles.rollout.seeds import make_training_seed_fn
from miles.schedule.loop import measure_group_seconds

QUESTION = Prompt(id=11, messages=({"role": "user", "content": "3+4="},), label="7", epoch=2)
SAMPLING = SamplingParams(max_new_tokens=20, temperature=0.7)


def producer(tokenizer, *, words=lambda seed: str(seed % 3 + 6), generate=None, group_size=8, **kw) -> GroupRollout:
    engine = Echo(tokenizer.encode, words, end=tokenizer.eos_token_id)
    generate = generate or SingleTurn(PromptRenderer(tokenizer, chat=False), tokenizer.text)
    return GroupRollout(
        engine=engine,
        generate=generate,
        sampling=SAMPLING,
        group_size=group_size,
        seed_fn=make_training_seed_fn(42),
        **kw,
    )


def produce(maker: GroupRollout, prompt: Prompt = QUESTION) -> Group:
    return asyncio.run(maker.produce(prompt))


def ended(status: Status, **kw) -> Trajectory:
    asked = Span(author=Author.PROMPT, tokens=np.array([1], np.int32))
    return Trajectory(branches=((asked,),), status=status, **kw)


async def one_point(prompt, trajectory):
    return Reward(value=1.0, parts={"form": 0.25})


def test_a_group_holds_every_trajectory_in_order_with_its_own_seed_and_score(tokenizer):
    group = produce(producer(tokenizer, reward=build_builtin_reward("int", GraderContext(seed=0))))
    seeds = [make_training_seed_fn(42)(QUESTION, i) for i in range(8)]
    assert [t.index for t in group.trajectories] == list(range(8))
    assert [t.metadata["text"] for t in group.trajectories] == [str(seed % 3 + 6) for seed in seeds]
    assert group.rewards == [float(seed % 3 == 1) for seed in seeds]
    assert group.prompt is QUESTION


def test_a_trajectory_has_the_seconds_of_its_generation_and_of_its_grading(tokenizer):
    now = [1000.0]

    async def slow_generate(prompt, engine, sampling):
        now[0] += 3.0
        return ended(Status.COMPLETED)

    async def slow_reward(prompt, trajectory):
        now[0] += 0.5
        return Reward(value=1.0)

    async def slow_group_reward(prompt, trajectories):
        now[0] += 7.0
        return [Reward(value=1.0) for _ in trajectories]

    made = producer(tokenizer, generate=slow_generate, reward=slow_reward, group_size=1, clock=lambda: now[0])
    assert produce(made).trajectories[0].times == {"started": 1000.0, "generate": 3.0, "grade": 0.5}
    made = producer(
        tokenizer,
        generate=slow_generate,
        group_reward=slow_group_reward,
        group_size=2,
        clock=lambda: now[0],
        allow_duplicates=True,
    )
    group = produce(made)
    assert [t.times["grade"] for t in group.trajectories] == [7.0, 7.0]
    assert measure_group_seconds(group) == {"generate": 3.0, "grade": 7.0, "group": 13.0}


def test_a_group_depends_on_nothing_but_its_prompt(tokenizer):
    maker = producer(tokenizer, reward=build_builtin_reward("int", GraderContext(seed=0)))

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
        if sampling.seed == make_training_seed_fn(42)(prompt, 3):
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


def test_a_reward_that_raises_costs_its_trajectory_the_score_and_nothing_else(tokenizer):
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

    group = produce(producer(tokenizer, reward=reward, group_size=2, reward_seconds=0.01))
    assert group.rewards == [0.0, 0.0]
    assert group.trajectories[0].metadata["unscored"] == "no reward within 0.01 s"


def test_a_time_limit_of_the_reward_s_own_is_told_as_its_own(tokenizer):
    async def reward(prompt, trajectory):
        raise TimeoutError("the tool")

    (one,) = produce(producer(tokenizer, reward=reward, group_size=1)).trajectories
    assert one.metadata["unscored"] == "TimeoutError: the tool"


def test_an_error_meant_for_the_user_stops_the_run_all_the_same(tokenizer):
    with pytest.raises(DataError, match="Prompt 11 has no label"):
        produce(producer(tokenizer, reward=build_builtin_reward("int", GraderContext())), replace(QUESTION, label=None))


def test_a_reward_that_always_fails_stops_the_run_with_its_reason(tokenizer):
    async def reward(prompt, trajectory):
        raise ZeroDivisionError("no judge")

    maker = producer(tokenizer, reward=reward, group_size=4, max_reward_failures=10)
    assert produce(maker).rewards == produce(maker).rewards == [0.0] * 4
    with pytest.raises(
        HookError, match=r"failed for 10 trajectories in a row, .*prompt 11 \(ZeroDivisionError: no judge\)"
    ):
        produce(maker)


@pytest.mark.parametrize("error", [asyncio.CancelledError(), KeyError("judge")])
def test_a_reward_that_raises_leaves_its_trajectory_unscored_and_the_first_one_is_reported(tokenizer, error):
    async def reward(prompt, trajectory):
        raise error

    reports = []
    group = produce(producer(tokenizer, reward=reward, group_size=3, report=reports.append))
    assert group.scored_trajectories == () and len(group.trajectories) == 3
    (report,) = reports
    assert report.startswith(f"The reward failed for a trajectory of prompt 11 ({type(error).__name__}")
    assert "128 in a row end the run (--max-reward-failures)" in report


def test_generation_that_always_fails_stops_the_run_with_its_reason(tokenizer):
    async def generate(prompt, engine, sampling):
        return ended(Status.FAILED, metadata={"text": "", "failure": "other tokens"})

    maker = producer(tokenizer, generate=generate, reward=one_point, group_size=2, max_reward_failures=3)
    assert produce(maker).scored_trajectories == ()
    with pytest.raises(HookError, match=r"The generation failed for 3 trajectories in a row.*\(other tokens\)"):
        produce(maker)


def test_one_success_forgives_the_failures_before_it(tokenizer):
    async def reward(prompt, trajectory):
        if trajectory.index:
            raise ZeroDivisionError("no judge")
        return Reward(value=1.0)

    maker = producer(tokenizer, reward=reward, group_size=3, max_reward_failures=4)
    assert [produce(maker).rewards for _ in range(5)] == [[1.0, 0.0, 0.0]] * 5


def test_a_group_reward_that_fails_leaves_its_group_unscored(tokenizer):
    async def rank(prompt, trajectories):
        raise KeyError("judge")

    group = produce(producer(tokenizer, group_reward=rank, group_size=3))
    assert group.rewards == [0.0] * 3
    assert {t.metadata["unscored"] for t in group.trajectories} == {"KeyError: 'judge'"}
    with pytest.raises(HookError, match="failed for 3 trajectories in a row"):
        produce(producer(tokenizer, group_reward=rank, group_size=3, max_reward_failures=3))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_names_the_prompt(tokenizer, value):
    async def reward(prompt, trajectory):
        return Reward(value=value)

    with pytest.raises(HookError, match=r"the reward of prompt 11 is .*finite"):
        produce(producer(tokenizer, reward=reward))


def test_a_reward_that_is_a_bare_number_says_what_to_return(tokenizer):
    async def reward(prompt, trajectory):
        return 1.0

    with pytest.raises(HookError, match=r"prompt 11 is the float 1.0; return miles\.core\.types\.Reward"):
        produce(producer(tokenizer, reward=reward))


@pytest.mark.parametrize("status", [Status.ABORTED, Status.FAILED])
def test_a_trajectory_that_did_not_end_by_itself_earns_nothing_unseen(tokenizer, status):
    async def generate(prompt, engine, sampling):
        return ended(status, metadata={"text": "half"})

    async def reward(prompt, trajectory):
        pytest.fail("scored")

    group = produce(producer(tokenizer, generate=generate, reward=reward, group_size=2))
    assert group.rewards == [0.0, 0.0]
    assert group.trajectories[0].metadata == {"text": "half", "unscored": str(status)}


def test_an_environment_may_score_as_it_goes(tokenizer):
    async def generate(prompt, engine, sampling):
        return ended(Status.COMPLETED, reward=Reward(value=0.5))

    assert produce(producer(tokenizer, generate=generate, group_size=2)).rewards == [0.5, 0.5]
    assert produce(producer(tokenizer, generate=generate, group_size=2, reward=one_point)).rewards == [0.5, 0.5]


def test_a_trajectory_that_nothing_scores_is_an_error(tokenizer):
    with pytest.raises(HookError, match=r"Nothing scores the trajectories of prompt 11; .*--rm-type"):
        produce(producer(tokenizer))


def test_the_reward_key_chooses_the_part_to_train_on(tokenizer):
    group = produce(producer(tokenizer, reward=one_point, reward_key="form", group_size=2))
    assert group.rewards == [0.25, 0.25]
    assert group.trajectories[0].reward == Reward(value=0.25, parts={"form": 0.25})
    with pytest.raises(HookError, match=r"prompt 11 has no part shape \(found: form\)"):
        produce(producer(tokenizer, reward=one_point, reward_key="shape"))


def test_a_group_reward_sees_all_trajectories_in_order(tokenizer):
    async def rank(prompt, trajectories):
        best = max(int(t.metadata["text"]) for t in trajectories)
        return [Reward(value=float(int(t.metadata["text"]) == best)) for t in trajectories]

    group = produce(producer(tokenizer, group_reward=rank))
    said = [int(t.metadata["text"]) for t in group.trajectories]
    assert group.rewards == [float(n == max(said)) for n in said]


def test_a_group_reward_must_score_every_trajectory(tokenizer):
    async def some(prompt, trajectories):
        return [Reward(value=1.0)]

    with pytest.raises(HookError, match="gave 1 rewards for the 8 trajectories of prompt 11"):
        produce(producer(tokenizer, group_reward=some))


def scored(*rewards: float) -> Group:
    return Group(prompt=QUESTION, trajectories=tuple(ended(Status.COMPLETED, reward=Reward(value=r)) for r in rewards))


def test_a_group_is_filtered_by_its_scored_trajectories():
    group = scored(1.0, 1.0, 0.0)
    failed = replace(group.trajectories[2], metadata={"unscored": "KeyError: 'judge'"})
    unequal = drop_unscored(nonzero_std)(replace(group, trajectories=(*group.trajectories[:2], failed)))
    assert (unequal.keep, unequal.reason) == (False, "zero_std_1")
    nothing = drop_unscored(keep_all)(replace(group, trajectories=(failed,)))
    assert (nothing.keep, nothing.reason) == (False, "unscored")
    assert drop_unscored(nonzero_std)(group).keep


def test_filters_keep_what_can_be_learned_from():
    assert keep_all(scored(1.0, 1.0)).keep
    assert nonzero_std(scored(0.0, 1.0)).keep
    assert (nonzero_std(scored(1.0, 1.0)).keep, nonzero_std(scored(1.0, 1.0)).reason) == (False, "zero_std_1")
    assert nonzero_std(scored(0.0, 0.0, 0.0)).reason == "zero_std_0"
    assert nonzero_std(scored(0.25)).reason == "zero_std_0.2"
    assert check_reward_nonzero_std is nonzero_std


class _RaisingStr(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (Reward(value="1.0"), "is the str '1.0'; a reward must be a finite number"),
        (Reward(value=None), "is None; a reward must be a finite number"),
        (Reward(value=10**400), "; a reward must be a finite number"),
        (Reward(value=np.array([1.0, 2.0])), "is the ndarray array"),
        (Reward(value=np.array([1.0])), "is the ndarray array"),
        (Reward(value=1.0, parts="form"), "has the str 'form' as its parts; give a dict of numbers by name"),
        (Reward(value=1.0, parts=[0.5]), "has the list [0.5] as its parts"),
        (Reward(value=1.0, parts={"form": "high"}), "part form, is the str 'high'"),
        (Reward(value=1.0, parts={"form": math.nan}), "part form, is nan"),
        (None, "is None; return miles.core.types.Reward(value=...)"),
    ],
)
def test_a_malformed_reward_is_an_error_that_names_the_function(tokenizer, reward, says):
    async def give(prompt, trajectory):
        return reward

    with pytest.raises(HookError) as raised:
        produce(producer(tokenizer, reward=give, reward_name="--custom-rm-path my.rewards:give"))
    assert str(raised.value).startswith("--custom-rm-path my.rewards:give: the reward of prompt 11")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, "gave None for prompt 11"),
        ("11111111", "gave the str '11111111' for prompt 11"),
        ((Reward(value=1.0) for _ in range(8)), "gave the generator"),
    ],
)
def test_a_group_reward_that_gives_no_list_is_an_error_that_names_it(tokenizer, given, says):
    async def give(prompt, trajectories):
        return given

    with pytest.raises(HookError, match="--custom-rm-path my:give: the group reward") as raised:
        produce(producer(tokenizer, group_reward=give, reward_name="--custom-rm-path my:give"))
    assert says in str(raised.value)


def test_an_exception_without_text_leaves_the_trajectory_unscored_with_its_type(tokenizer):
    async def give(prompt, trajectory):
        raise _RaisingStr

    group = produce(producer(tokenizer, reward=give))
    assert {t.metadata["unscored"] for t in group.trajectories} == {"_RaisingStr: (its message raises RuntimeError)"}


def test_numpy_and_integer_rewards_become_plain_floats(tokenizer):
    async def give(prompt, trajectory):
        return Reward(value=np.float32(0.5), parts={"form": np.int64(2), "short": True})

    reward = produce(producer(tokenizer, reward=give)).trajectories[0].reward
    assert reward is not None
    assert [type(x) for x in (reward.value, *reward.parts.values())] == [float, float, float]
