"""Which reward scores a trajectory: one, a mixture, a prompt's own; alone or with its group."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.rollout.reward.reward_case import prompt, reward, trajectory, value
from tests.rollout.reward.scripted_server import serving

from miles.core.errors import DataError, HookError, UsageError
from miles.core.types import Reward
from miles.rollout.reward.context import GraderContext, HTTPEndpoint, JudgeEndpoint
from miles.rollout.reward.mixture import build_builtin_group_reward, build_builtin_reward, combine_rewards
from miles.rollout.reward.registry import RewardTerm


def test_a_built_in_reward_grades_the_reply_against_the_label():
    assert value("int", "it is 7", "7") == 1.0
    assert value("boxed_int", "it is 7", "7") == 0.0


def test_a_mixture_is_the_weighted_sum_and_tells_its_parts_by_name():
    given = reward("exact:0.9+contains:0.1", "it is 7", "7")
    assert given == Reward(value=0.1, parts={"exact": 0.0, "contains": 1.0})
    given = reward("dapo:0.5 + boxed_int", r"Answer: 7 \boxed{8}", "7")
    assert given.value == -0.5
    assert given.parts == {"dapo": -1.0, "dapo.score": -1.0, "dapo.acc": 0.0, "boxed_int": 0.0}


def test_a_weight_alone_scales_and_keeps_the_parts_as_they_are():
    assert reward("dapo:0.5", "Answer: 7", "7") == Reward(value=0.5, parts={"score": 1.0, "acc": 1.0})


@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-1, 1)), min_size=1, max_size=5))
def test_the_sum_is_linear_in_the_weights(pairs):
    parts = [RewardTerm(f"r{i}", weight) for i, (weight, _) in enumerate(pairs)]
    rewards = [Reward(value=value) for _, value in pairs]
    assert combine_rewards(parts, rewards).value == pytest.approx(sum(w * v for w, v in pairs), abs=1e-9)


def test_a_prompt_may_name_its_own_reward():
    own = {"rm_type": "contains"}
    assert value("exact", "it is 7", "7") == 0.0
    assert value("exact", "it is 7", "7", metadata=own) == 1.0
    assert value("exact", "it is 7", "7", metadata={"rm_type": "exact:0.5+contains:0.5"}) == 0.5
    assert value("contains", "it is 7", "7", metadata={"rm_type": None}) == 1.0


@pytest.mark.parametrize(
    ("grader", "complaint"),
    [
        ("exakt", r"Prompt 3: --rm-type exakt is not a built-in reward.* did you mean exact\?"),
        (7, r"Prompt 3: metadata\['rm_type'\] must be the name of a reward, not 7"),
        ("remote_rm", "Prompt 3: .*--rm-url"),
        ("llm_judge", "Prompt 3 asks for llm_judge, which compares all trajectories of a prompt; give --group-rm"),
    ],
)
def test_a_request_that_cannot_be_granted_names_the_prompt(grader, complaint):
    with pytest.raises(DataError, match=complaint):
        value("exact", "7", "7", metadata={"rm_type": grader})


def test_a_reply_without_text_is_the_generate_functions_fault():
    with pytest.raises(HookError, match="stored none in metadata"):
        asyncio.run(build_builtin_reward("exact", GraderContext())(prompt("7"), trajectory()))


def test_a_server_that_is_missing_is_told_before_anything_starts():
    with pytest.raises(UsageError, match="--rm-url"):
        build_builtin_reward("exact+remote_rm", GraderContext())


def together(rm_type, replies, means, label="7", metadata=None):
    tries = [trajectory(reply, index=i) for i, reply in enumerate(replies)]
    score = build_builtin_group_reward(rm_type, means)
    return asyncio.run(score(prompt(label, metadata=metadata or {}), tries))


def test_single_rewards_score_a_group_trajectory_by_trajectory():
    assert [r.value for r in together("int", ["7", "8", "7"], GraderContext())] == [1.0, 0.0, 1.0]
    assert [r.value for r in together("int", ["it is 7"], GraderContext(), metadata={"rm_type": "exact"})] == [0.0]


def test_a_trajectory_that_has_a_reward_is_not_scored_again():
    tries = [trajectory("7", reward=Reward(value=0.25)), trajectory("7", index=1)]
    given = asyncio.run(build_builtin_group_reward("int", GraderContext())(prompt("7"), tries))
    assert [r.value for r in given] == [0.25, 1.0]


def test_a_judge_and_a_rule_may_share_the_verdict():
    def answer(asked):
        trajectories = json.loads(asked.body["messages"][1]["content"])["attempts"]
        scores = {"scores": [10 if "please" in one else 0 for one in trajectories]}
        return {"choices": [{"message": {"content": json.dumps(scores)}}]}

    async def run():
        async with serving(answer) as served:
            means = GraderContext(judge=JudgeEndpoint(server=HTTPEndpoint(url=served.url), model="m"))
            score = build_builtin_group_reward("int:0.75+llm_judge:0.25", means)
            return await score(
                prompt("7"), [trajectory("7 please"), trajectory("7", index=1), trajectory("8 please", index=2)]
            )

    given = asyncio.run(run())
    assert [r.value for r in given] == pytest.approx([0.75 + 0.25 * 0.75, 0.75, 0.25 * 0.75])
    assert given[0].parts == {"int": 1.0, "llm_judge": 0.75, "llm_judge.wins": 0.75, "llm_judge.score": 1.0}


def test_the_random_reward_is_chance_that_repeats():
    async def drawn(seed):
        score = build_builtin_reward("random", GraderContext(seed=seed))
        asked = [(prompt(id=p, epoch=e), trajectory(index=i)) for p in range(20) for e in (0, 1) for i in range(8)]
        return [(await score(*one)).value for one in asked]

    first, again, other = (asyncio.run(drawn(seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert set(first) == {0.0, 1.0}
    assert 0.35 < sum(first) / len(first) < 0.65


def test_the_deterministic_random_reward_follows_the_text_and_needs_no_label():
    scores = [value("deterministic_random", f"reply {i}", None) for i in range(60)]
    assert scores == [value("deterministic_random", f"reply {i}", "x") for i in range(60)]
    assert 15 < sum(scores) < 45
