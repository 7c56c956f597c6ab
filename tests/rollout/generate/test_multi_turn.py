"""The multi-turn loop: what is trained is what was sampled, limits end it rightly, and worlds may fail."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.rollout.generate.scripted_engine import Scripted, call, chat_tokenizer
from tests.tiers import examples

from miles.algo.advantages import build_samples
from miles.core.errors import DataError, HookError
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Group, Prompt, Status, Version
from miles.observe.metric import group_metrics, list_undocumented
from miles.rollout.generate.dispatch import GenerateDispatch
from miles.rollout.generate.multi_turn import MultiTurn, TurnLimits
from miles.rollout.group_rollout import GroupRollout
from miles.rollout.seeds import make_training_seed_fn
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.env_registry import EnvironmentFactory
from miles.rollout.tools.environment import OpenResult, StepResult, ToolEnvironment
from miles.rollout.tools.tool import EnvironmentFailed, Tool, ToolLimits
from miles.rollout.tools.toolbox import ToolRegistry, ToolResources

PROMPT = Prompt(id=7, messages=({"role": "user", "content": "What is 6 * 7?"},))
SAMPLING = SamplingParams(max_new_tokens=2000)
SUM = call("calculator", expression="6 * 7")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return build_renderer(tokenizer)


def calculating(renderer, **knobs):
    tools = knobs.pop("tools", ToolLimits())
    return MultiTurn(renderer, EnvironmentFactory(ToolRegistry(ToolResources(), ["calculator"]), tools), **knobs)


def run(generate, engine, prompt=PROMPT, sampling=SAMPLING):
    return asyncio.run(generate(prompt, engine, sampling))


def sampled(trajectory):
    return [span.tokens.tolist() for span in trajectory.spans if span.author is Author.POLICY]


def joined(parts):
    return list(chain.from_iterable(parts))


def test_a_call_is_answered_and_only_what_was_sampled_is_trained(tokenizer, renderer):
    engine = Scripted(tokenizer, [f"Let me see. {SUM}", "It is 42."])
    trajectory = run(calculating(renderer), engine)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.COMPLETED, "stop")
    assert (trajectory.metadata["text"], trajectory.metadata["turns"]) == ("It is 42.", 2)
    assert (trajectory.metadata["tool_calls"], trajectory.metadata["tool_failures"]) == (1, 0)
    assert [m["role"] for m in trajectory.metadata["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.metadata["messages"][2]["content"] == "42"
    (branch,) = trajectory.branches
    assert joined(sampled(trajectory)) == joined(engine.gave)
    # What the engine was shown at the second turn is a beginning of the branch, token for token.
    whole = np.concatenate([span.tokens for span in branch]).tolist()
    assert whole[: len(engine.asked[1][0])] == engine.asked[1][0]
    assert "<tool_response>\n42\n</tool_response>" in tokenizer.decode(whole)
    assert {span.version.number for span in branch if span.version} == {1, 2}


def test_the_tools_are_shown_to_the_policy_as_the_template_shows_them(tokenizer, renderer):
    engine = Scripted(tokenizer, ["42"])
    run(calculating(renderer), engine)
    assert '"name": "calculator"' in tokenizer.decode(engine.asked[0][0])


def test_a_prompt_chooses_its_tools_by_a_column_of_the_data(tokenizer, renderer):
    engine = Scripted(tokenizer, ["42"])
    run(calculating(renderer), engine, replace(PROMPT, metadata={"tools": ["files"]}))
    shown = tokenizer.decode(engine.asked[0][0])
    assert "read_file" in shown and "calculator" not in shown
    with pytest.raises(DataError, match="did you mean calculator"):
        run(calculating(renderer), engine, replace(PROMPT, metadata={"tools": "calculater"}))


def test_a_failing_tool_is_text_to_the_model_which_goes_on(tokenizer, renderer):
    wrong = [call("calculator", expression="1/0"), call("nothing"), call("calculator"), "Sorry."]
    trajectory = run(calculating(renderer), Scripted(tokenizer, wrong))
    said = [m["content"] for m in trajectory.metadata["messages"] if m["role"] != "assistant"][1:]
    assert trajectory.status is Status.COMPLETED and trajectory.metadata["tool_failures"] == 3
    assert (
        "division by zero" in said[0] and "there is no tool 'nothing'" in said[1] and "expression is missing" in said[2]
    )


@pytest.mark.parametrize(
    ("limits", "sampling", "context", "reason"),
    [
        (TurnLimits(turns=3), SAMPLING, None, "turns"),
        (TurnLimits(), replace(SAMPLING, max_new_tokens=150), None, "length"),
        (TurnLimits(turn_tokens=5), SAMPLING, None, "length"),
        (TurnLimits(), SAMPLING, 700, "length"),
    ],
)
def test_limits_cut_a_trajectory_short_and_say_which(tokenizer, renderer, limits, sampling, context, reason):
    engine = Scripted(tokenizer, [SUM])
    trajectory = run(calculating(renderer, limits=limits, max_context_len=context), engine, sampling=sampling)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.TRUNCATED, reason)
    assert joined(sampled(trajectory)) == joined(engine.gave)
    assert trajectory.response_length <= sampling.max_new_tokens
    if context is not None:
        assert sum(map(len, trajectory.branches[0])) <= context


def test_a_result_that_leaves_no_room_for_a_reply_ends_the_trajectory(tokenizer, renderer):
    engine = Scripted(tokenizer, [call("list_files")])
    prompt = replace(PROMPT, metadata={"tools": ["files"], "files": {f"file-{i:03}": "" for i in range(60)}})
    first = run(calculating(renderer, limits=TurnLimits(turns=1)), engine, prompt)
    asked = sum(map(len, first.branches[0]))
    trajectory = run(calculating(renderer, max_context_len=asked + 50), engine, prompt)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.TRUNCATED, "context")
    assert trajectory.metadata["turns"] == 1


def test_a_prompt_that_fills_the_context_is_the_datas_fault(tokenizer, renderer):
    with pytest.raises(DataError, match=r"Prompt 7 has .* tokens with its tools"):
        run(calculating(renderer, max_context_len=20), Scripted(tokenizer, ["42"]))


def test_an_engine_that_is_told_to_stop_aborts_the_trajectory_and_keeps_its_tokens(tokenizer, renderer):
    engine = Scripted(tokenizer, [SUM])
    engine.aborts = True
    trajectory = run(calculating(renderer), engine)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.ABORTED, "abort")
    assert sampled(trajectory) == [engine.gave[0][: len(engine.gave[0]) // 2]]


def test_time_is_up_for_all_of_a_trajectory_or_for_its_tools(tokenizer, renderer):
    hanging = Scripted(tokenizer, ["42"])
    hanging.hangs = True
    trajectory = run(calculating(renderer, limits=TurnLimits(wall_seconds=0.02)), hanging)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.FAILED, "wall_time")
    assert trajectory.response_length == 0

    closed = []

    async def hands(prompt, stack: AsyncExitStack):
        stack.callback(closed.append, True)

        async def never(arguments):
            await asyncio.Event().wait()

        return [Tool(name="never", description="", parameters={"type": "object"}, call=never)]

    engine = Scripted(tokenizer, [call("never"), "Well."])
    slow = MultiTurn(renderer, lambda prompt: ToolEnvironment(hands, ToolLimits(call_seconds=0.01)))
    trajectory = run(slow, engine)
    assert trajectory.status is Status.COMPLETED
    assert "no answer within 0.01 seconds" in trajectory.metadata["messages"][2]["content"]
    slower = MultiTurn(renderer, lambda prompt: ToolEnvironment(hands, ToolLimits(tool_seconds=0.01)))
    trajectory = run(slower, Scripted(tokenizer, [call("never")]))
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.TRUNCATED, "tool_time")
    assert closed == [True, True]


class Counting:
    """A world of our own: say the numbers from 1 on, and a third of the reward is there for each."""

    def __init__(self, fails=""):
        self.fails = fails
        self.number = 0
        self.closed = False

    async def open(self, prompt):
        if self.fails == "open":
            raise OSError("the world is on fire")
        return OpenResult(messages=({"role": "user", "content": "Count."},), provides_reward=True)

    async def step(self, reply):
        if self.fails == "step":
            raise EnvironmentFailed("the world is on fire")
        self.number += 1
        right = reply["content"] == str(self.number)
        if not right or self.number == 3:
            return StepResult(reward=right / 4, parts={"right": float(right)}, done=True)
        return StepResult(messages=[{"role": "user", "content": "And then?"}], reward=1 / 4, parts={"right": 1.0})

    async def close(self):
        self.closed = True
        if self.fails == "close":
            raise OSError("the door is stuck")


def test_a_worlds_rewards_add_up_over_its_turns(tokenizer, renderer):
    trajectory = run(MultiTurn(renderer, lambda prompt: Counting()), Scripted(tokenizer, ["1", "2", "3"]))
    assert trajectory.reward is not None and trajectory.reward.value == 0.75
    assert trajectory.reward.parts == {"right": 3.0} and trajectory.metadata["turns"] == 3
    short = MultiTurn(renderer, lambda prompt: Counting(), limits=TurnLimits(turn_tokens=1))
    trajectory = run(short, Scripted(tokenizer, ["10"]))
    assert trajectory.status is Status.TRUNCATED
    assert trajectory.reward is not None and trajectory.reward.value == 0.0


@pytest.mark.parametrize("where", ["open", "step"])
def test_a_world_that_fails_marks_the_trajectory_failed_and_is_closed(tokenizer, renderer, where):
    worlds = []

    def world_of(prompt):
        worlds.append(Counting(where))
        return worlds[-1]

    generate = MultiTurn(renderer, world_of, max_failures=2)
    trajectory = run(generate, Scripted(tokenizer, ["1"]))
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.FAILED, "environment")
    assert "the world is on fire" in trajectory.metadata["failure"] and trajectory.reward is None
    with pytest.raises(HookError, match="failed in 2 trajectories in a row, the last at prompt 7"):
        run(generate, Scripted(tokenizer, ["1"]))
    assert all(world.closed for world in worlds)


def test_a_world_that_cannot_be_closed_does_not_cost_its_trajectory(tokenizer, renderer):
    trajectory = run(MultiTurn(renderer, lambda prompt: Counting("close")), Scripted(tokenizer, ["1", "2", "3"]))
    assert trajectory.status is Status.COMPLETED and trajectory.reward is not None
    assert "the door is stuck" in trajectory.metadata["close_failure"]


class Compacting:
    """A world that gives the policy a shorter conversation half-way, as agents with little context do."""

    def __init__(self):
        self.steps = 0

    async def open(self, prompt):
        return OpenResult(messages=({"role": "user", "content": "A long story."},))

    async def step(self, reply):
        self.steps += 1
        if self.steps == 2:
            return StepResult(
                messages=[{"role": "user", "content": f"So far: {reply['content']}"}], replaces_history=True
            )
        return StepResult(messages=[{"role": "user", "content": "Go on."}], done=self.steps == 4)

    async def close(self):
        return


def test_a_conversation_begun_anew_is_a_branch_and_every_reply_is_drawn_with_its_own_seed(tokenizer, renderer):
    engine = Scripted(tokenizer, ["One.", "Two.", "Three.", "Four."])
    trajectory = run(MultiTurn(renderer, lambda prompt: Compacting()), engine)
    assert len(trajectory.branches) == 2 and trajectory.status is Status.COMPLETED
    assert joined(sampled(trajectory)) == joined(engine.gave)
    seeds = [sampling.seed for _, sampling in engine.asked]
    assert len(set(seeds)) == 4, "an engine's random numbers restart with every reply"


def test_prompts_may_be_answered_in_different_ways(tokenizer, renderer):
    ways = {"tools": calculating(renderer), "counting": MultiTurn(renderer, lambda prompt: Counting())}
    chosen = GenerateDispatch(ways, "tools")
    assert run(chosen, Scripted(tokenizer, ["42"])).reward is None
    counted = run(chosen, Scripted(tokenizer, ["1", "9"]), replace(PROMPT, metadata={"generate": "counting"}))
    assert counted.reward is not None and counted.reward.value == 0.25
    with pytest.raises(DataError, match="asks for the generate function 'magic'"):
        run(chosen, Scripted(tokenizer, ["42"]), replace(PROMPT, metadata={"generate": "magic"}))


LINES = st.one_of(
    st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20),
    st.builds(lambda a, b: call("calculator", expression=f"{a} * {b}"), st.integers(0, 99), st.integers(0, 99)),
    st.builds(lambda text: f"{SUM}{text}{SUM}", st.sampled_from(["", "\n", " and "])),
    st.sampled_from(["<tool_call>{}</tool_call>", "<tool_call>", '<tool_call>{"name": "calculator"', "<think>hm"]),
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(LINES, min_size=1, max_size=5), st.integers(1, 6), st.integers(20, 400))
def test_whatever_a_policy_says_the_trained_tokens_are_the_sampled_ones(tokenizer, renderer, script, turns, tokens):
    engine = Scripted(tokenizer, script)
    generate = calculating(renderer, limits=TurnLimits(turns=turns))
    trajectory = run(generate, engine, sampling=replace(SAMPLING, max_new_tokens=tokens))
    assert joined(sampled(trajectory)) == joined(engine.gave)
    assert len(trajectory.branches) == 1
    whole = np.concatenate([span.tokens for span in trajectory.branches[0]]).tolist()
    assert all(whole[: len(asked)] == asked for asked, _ in engine.asked)


def test_a_trajectory_nobody_waits_for_any_more_closes_its_world(tokenizer, renderer):
    world = Counting()
    engine = Scripted(tokenizer, ["1"])
    engine.hangs = True

    async def give_up():
        task = asyncio.create_task(MultiTurn(renderer, lambda prompt: world)(PROMPT, engine, SAMPLING))
        while not engine.asked:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(give_up()) and world.closed


def test_an_audit_tells_where_tokens_are_not_the_templates(tokenizer, renderer):
    spoken = [SUM, "It is 42."]
    exact = run(calculating(renderer, audit=True), Scripted(tokenizer, spoken))
    loose = run(calculating(renderer, audit=True), Scripted(tokenizer, [SUM.replace("\n", ""), "It is 42."]))
    silent = run(calculating(renderer), Scripted(tokenizer, spoken))
    assert exact.metadata["session_mismatch"] == {} and "session_mismatch" not in silent.metadata
    assert loose.metadata["session_mismatch"] == {"whitespace": 1}
    group = Group(prompt=PROMPT, trajectories=(exact, loose, silent))
    found = group_metrics([group], Version(number=2))
    assert found["session_mismatch/whitespace"] == 0.5 and found["session_mismatch/refused"] == 0.0
    assert not list_undocumented(found)
    assert not any(
        name.startswith("session_mismatch") for name in group_metrics([replace_tries(group, silent)], Version())
    )


def replace_tries(group, *tries):
    return replace(group, trajectories=tries)


def test_a_group_whose_world_failed_is_scored_credited_and_measured(tokenizer, renderer):
    fails = iter(["open", "", "step", ""])
    producer = GroupRollout(
        engine=Scripted(tokenizer, ["1"]),
        generate=MultiTurn(renderer, lambda prompt: Counting(next(fails))),
        sampling=SAMPLING,
        group_size=4,
        seed_fn=make_training_seed_fn(0),
    )
    group = asyncio.run(producer.produce(PROMPT))
    assert [t.status for t in group.trajectories].count(Status.FAILED) == 2
    assert sorted(group.rewards) == [0.0, 0.0, 0.25, 0.25]
    assert all(t.metadata["unscored"] == "failed" for t in group.trajectories if t.status is Status.FAILED)
    rows = [build_samples(group.prompt.id, t, advantage=0.5, trained_author=Author.POLICY) for t in group.trajectories]
    lengths = [sum(int(row.mask.sum()) for row in each) for each in rows]
    assert lengths == [t.response_length for t in group.trajectories] and 0 in lengths
    assert group_metrics([group], Version(number=2))["unscored_ratio"] == 0.5
