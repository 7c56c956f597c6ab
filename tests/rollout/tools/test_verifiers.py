"""The connector on the real package, where it is installed: its environments before 0.4, and its episodes since."""

import asyncio
import json
from importlib.metadata import version
from pathlib import Path

import pytest

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.tools.environments.verifiers import VerifiersEnvironment
from miles.rollout.tools.tool import EnvironmentFailed

pytest.importorskip("verifiers")
pytest.importorskip("openai")
EPISODES = tuple(map(int, version("verifiers").split(".")[:2])) >= (0, 4)
environments = pytest.mark.skipif(EPISODES, reason="environments of verifiers before 0.4")
episodes = pytest.mark.skipif(not EPISODES, reason="episodes of verifiers from 0.4 on")
PROMPT = Prompt(id=5, messages=({"role": "user", "content": "A number?"},), label="7")


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """Environments are modules that can be imported."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def says(text):
    return {"role": "assistant", "content": text}


def calls(name, **arguments):
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c0", "type": "function", "function": function}]}


async def played(environment, replies, prompt=PROMPT):
    """The opening and the steps; nothing may be left running."""
    try:
        opening = await environment.open(prompt)
        return opening, [await environment.step(reply) for reply in replies]
    finally:
        await environment.close()


def plain(messages):
    return [(message["role"], message.get("content")) for message in messages]


def quiz(**settings):
    return VerifiersEnvironment("quiz-env", settings=settings)


@environments
def test_one_turn_is_scored_by_the_rubric():
    opening, (step,) = asyncio.run(played(quiz(), [says("7")]))
    assert plain(opening.messages) == [("user", "A number?")] and opening.provides_reward and not opening.tools
    assert (step.done, step.reward, step.parts["right"]) == (True, 1.0, 1.0)
    assert asyncio.run(played(quiz(), [says("8")]))[1][0].reward == 0.0


@environments
def test_a_reply_that_says_nothing_is_worth_nothing():
    _, (step,) = asyncio.run(played(quiz(), [says("")]))
    assert (step.done, step.reward) == (True, 0.0)


@environments
def test_several_turns_go_on_until_a_stop_of_its_own():
    _, steps = asyncio.run(played(quiz(kind="several"), [says("3"), says("9"), says("7")]))
    assert [plain(step.messages) for step in steps] == [[("user", "higher")], [("user", "lower")], []]
    assert [step.replaces_history for step in steps[:2]] == [False, False]
    assert (steps[-1].done, steps[-1].reward, steps[-1].parts["num_turns"]) == (True, 1.0, 3.0)
    _, steps = asyncio.run(played(quiz(kind="several", max_turns=1), [says("3")]))
    assert (steps[-1].done, steps[-1].reward) == (True, 0.0)


@environments
def test_its_tools_are_offered_and_called():
    opening, steps = asyncio.run(played(quiz(kind="tool"), [calls("double", number=4), says("7")]))
    offered = opening.tools[0]["function"]
    assert (offered["name"], list(offered["parameters"]["properties"])) == ("double", ["number"])
    assert plain(steps[0].messages) == [("tool", "8")] and not steps[0].replaces_history
    assert (steps[1].done, steps[1].reward, steps[1].parts["total_tool_calls"]) == (True, 1.0, 1.0)


@environments
def test_a_conversation_it_rewrites_begins_anew():
    _, steps = asyncio.run(played(quiz(kind="several", forgetful=True), [says("3"), says("7")]))
    assert steps[0].replaces_history and plain(steps[0].messages) == [("user", "higher")]


@environments
def test_what_breaks_in_it_is_a_failed_trajectory_and_what_cannot_be_loaded_a_users_error():
    with pytest.raises(EnvironmentFailed, match="the quiz is off"):
        asyncio.run(played(quiz(kind="broken"), []))
    with pytest.raises(UsageError, match=r"no_such_env|no-such-env"):
        asyncio.run(played(VerifiersEnvironment("no-such-env"), []))
    with pytest.raises(UsageError, match="quiz-env cannot be loaded"):
        asyncio.run(played(quiz(kind="none"), []))
    with pytest.raises(UsageError, match=r"cannot score a trajectory by itself.*group-level"):
        asyncio.run(played(quiz(kind="group"), [says("7")]))


def game(harness=None, **settings):
    agent = {"runtime": {"type": "subprocess"}, "harness": {"id": "episode-env", **(harness or {})}}
    return VerifiersEnvironment("episode-env", settings={"agent": agent, **settings})


@episodes
@pytest.mark.parametrize("streams", [False, True])
def test_an_episode_is_played_and_scored_by_its_task(streams):
    prompt = Prompt(id=5, messages=({"role": "system", "content": "Be brief."}, *PROMPT.messages), label="7")
    opening, steps = asyncio.run(played(game({"streams": streams}), [says("8"), says("7")], prompt))
    assert plain(opening.messages) == [("system", "Be brief."), ("user", "A number?")] and opening.provides_reward
    assert plain(steps[0].messages) == [("user", "lower")] and not steps[0].replaces_history
    assert (steps[1].done, steps[1].reward, steps[1].parts) == (True, 2.0, {"right": 1.0, "replies": 2.0})


@episodes
def test_a_prompts_metadata_has_the_rest_of_a_task():
    prompt = Prompt(id=5, messages=PROMPT.messages, label="7", metadata={"task": {"hint": "colder"}})
    _, steps = asyncio.run(played(game(), [says("8")], prompt))
    assert plain(steps[0].messages) == [("user", "colder")]
    wrong = Prompt(id=5, messages=PROMPT.messages, metadata={"task": {"hint": 3}})
    with pytest.raises(DataError, match=r"Prompt 5 is no task of QuizTaskset(.|\n)*hint"):
        asyncio.run(played(game(), [], wrong))


@episodes
def test_an_episode_that_breaks_is_a_failed_trajectory_and_one_left_early_leaves_nothing_behind():
    with pytest.raises(EnvironmentFailed, match="the quiz is off"):
        asyncio.run(played(game({"breaks": True}), []))
    with pytest.raises(UsageError, match="no-such-env cannot be loaded"):
        asyncio.run(played(VerifiersEnvironment("no-such-env"), []))

    async def left():
        before = asyncio.all_tasks()
        await played(game(), [])
        await asyncio.sleep(0)
        return asyncio.all_tasks() - before

    assert asyncio.run(left()) == set()
