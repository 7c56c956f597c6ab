"""Connectors to other people's worlds, on small ones of our own and on the real packages where they are installed."""

import asyncio
import sys
from types import ModuleType

import pytest

from miles.core.errors import UsageError
from miles.core.types import Prompt
from miles.rollout.data.dataset import read_dataset
from miles.rollout.tools.environments.text_games import GymnasiumGame, derive_game_seed, extract_action

PROMPT = Prompt(id=5, messages=({"role": "system", "content": "Guess the number."},), label="7")


def says(text):
    return {"role": "assistant", "content": text}


async def played(env, replies, prompt=PROMPT):
    """What the env showed at each turn, and the steps."""
    try:
        opening = await env.open(prompt)
        steps = []
        for reply in replies:
            steps.append(await env.step(reply(opening, steps) if callable(reply) else says(reply)))
            if steps[-1].done:
                break
        return opening, steps
    finally:
        await env.close()


class Guessing:
    """Gymnasium's way: guess a number from 1 to 7 in four tries."""

    def __init__(self):
        self.closed = 0

    def reset(self, *, seed=None):
        self.number, self.left = seed % 7 + 1, 4
        return f"A number from 1 to 7, seed {seed}.", {}

    def step(self, action):
        self.left -= 1
        if not action.isdigit():
            raise TypeError("not a number")
        right = int(action) == self.number
        return ("higher" if int(action) < self.number else "lower"), float(right), right, self.left == 0, {}

    def close(self):
        self.closed += 1


def test_a_game_of_gymnasiums_kind_is_played_to_its_end():
    game = Guessing()
    number = derive_game_seed(PROMPT) % 7 + 1
    wrong = "1" if number > 1 else "2"
    env = GymnasiumGame(make=lambda: game)
    opening, steps = asyncio.run(played(env, [wrong, f"I think <action> {number} </action>"]))
    assert opening.messages[1]["content"].startswith("A number from 1 to 7") and opening.provides_reward
    assert [step.messages[0]["content"] if step.messages else "" for step in steps] == (
        ["higher" if number > 1 else "lower", ""]
    )
    assert [(step.reward, step.done, step.limit) for step in steps] == [(0.0, False, None), (1.0, True, None)]
    assert game.closed == 1


def test_a_game_that_is_cut_off_or_breaks_says_so():
    number = derive_game_seed(PROMPT) % 7 + 1
    wrong = "1" if number > 1 else "2"
    _, steps = asyncio.run(played(GymnasiumGame(make=Guessing), [wrong] * 4))
    assert (steps[-1].done, steps[-1].limit) == (True, "game")
    with pytest.raises(TypeError, match="not a number"):  # which the loop makes a failed trajectory of
        asyncio.run(played(GymnasiumGame(make=Guessing), ["seven"]))
    _, steps = asyncio.run(played(GymnasiumGame(make=Guessing, actions={"low": "1"}), ["high"]))
    assert "'high' is not an action; there are low" in steps[0].messages[0]["content"]


def test_trajectories_at_a_prompt_play_the_same_game():
    assert (
        derive_game_seed(PROMPT)
        == derive_game_seed(Prompt(id=5, messages=(), epoch=3))
        != derive_game_seed(Prompt(id=6, messages=()))
    )
    assert derive_game_seed(Prompt(id=5, messages=(), metadata={"seed": 11})) == 11


@pytest.mark.parametrize(
    ("reply", "action"),
    [
        ("go left", "go left"),
        ("<think>go right?</think>\ngo left", "go left"),
        ("<action>a</action> no, <action>b</action>", "b"),
        (None, ""),
    ],
)
def test_an_action_is_found_in_what_is_said(reply, action):
    assert extract_action({"content": reply}) == action


def test_reasoning_gyms_own_scorers_say_what_is_right():
    pytest.importorskip("reasoning_gym")
    from miles.rollout.tools.environments.reasoning_gym import ReasoningGym

    prompt = read_dataset("reasoning_gym:leg_counting?size=2&seed=1", input_key="input").prompts[0]
    right = f"<answer>{prompt.label}</answer>"

    async def play():
        return (
            await played(ReasoningGym(), [right], prompt),
            await played(ReasoningGym(tries=3, price=0.25), ["no idea", right], prompt),
            await played(ReasoningGym(tries=1), ["-5"], prompt),
        )

    (opening, once), (_, twice), (_, never) = asyncio.run(play())
    assert opening.messages == prompt.messages and opening.provides_reward
    assert (once[0].reward, once[0].done, once[0].parts) == (1.0, True, {"right": 1.0})
    assert [step.done for step in twice] == [False, True] and twice[1].reward == 0.75
    assert never[0].done and never[0].reward is not None and never[0].reward < 1.0


# -- verifiers: a stand-in with the package's calls, driven by OpenAI's real client ----------


class Verifiers(ModuleType):
    """What the connector uses of the package, with a quiz for an environment."""

    EmptyModelResponseError = type("EmptyModelResponseError", (Exception,), {})

    def load_environment(self, id, **settings):
        return Quiz(id, **settings)

    def OpenAIChatCompletionsClient(self, client):
        return client


class Quiz:
    def __init__(self, id, *, questions=2, forgetful=False, breaks=False):
        self.id, self.questions, self.forgetful, self.breaks = id, questions, forgetful, breaks
        self.rubric = self

    async def rollout(self, row, client, model, sampling_args):
        messages, state = list(row["prompt"]), {"answers": [], "row": row, "error": None}
        for number in range(self.questions):
            if self.breaks:
                raise RuntimeError("the quiz is off")
            tool = {"type": "function", "function": {"name": "peek", "parameters": {"type": "object"}}}
            said = await client.chat.completions.create(model=model, messages=messages, tools=[tool])
            reply = said.choices[0].message
            state["answers"].append(reply.content)
            messages = [] if self.forgetful else [*messages, reply.model_dump(exclude_none=True)]
            messages.append({"role": "user", "content": f"Question {number + 2}?"})
        return state

    async def score_rollout(self, state):
        right = sum(answer == state["row"]["answer"] for answer in state["answers"])
        state["reward"], state["metrics"] = right / self.questions, {"right": right}

    async def cleanup(self, state):
        state["cleaned"] = True


@pytest.fixture
def verifiers(monkeypatch):
    pytest.importorskip("openai")
    pytest.importorskip("httpx")
    monkeypatch.setitem(sys.modules, "verifiers", Verifiers("verifiers"))
    from miles.rollout.tools.environments import verifiers as connector

    connector._load_environment.cache_clear()
    return connector.VerifiersEnvironment


def test_an_environment_of_verifiers_drives_itself_and_is_scored_by_its_rubric(verifiers):
    opening, steps = asyncio.run(played(verifiers("quiz"), ["7", "8"]))
    assert opening.messages == [{"role": "system", "content": "Guess the number."}]
    assert opening.tools[0]["function"]["name"] == "peek" and opening.provides_reward
    assert [dict(message) for message in steps[0].messages] == [{"role": "user", "content": "Question 2?"}]
    assert not steps[0].replaces_history
    assert (steps[1].done, steps[1].reward, steps[1].parts) == (True, 0.5, {"right": 1.0})


def test_an_environment_that_rewrites_the_conversation_begins_it_anew(verifiers):
    _, steps = asyncio.run(played(verifiers("quiz", settings={"forgetful": True}), ["7", "7"]))
    assert steps[0].replaces_history and steps[0].messages == [{"role": "user", "content": "Question 2?"}]
    assert steps[1].reward == 1.0


def test_what_an_environment_of_verifiers_raises_comes_out_and_nothing_is_left_running(verifiers):
    with pytest.raises(RuntimeError, match="the quiz is off"):
        asyncio.run(played(verifiers("quiz", settings={"breaks": True}), ["7"]))

    async def leave():
        env = verifiers("quiz")
        await env.open(PROMPT)
        await env.close()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(leave()) == []


def test_a_verifiers_without_environments_is_refused(monkeypatch):
    from miles.rollout.tools.environments.verifiers import VerifiersEnvironment

    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UsageError, match=r"needs verifiers\.v1, .* pip install 'verifiers>=0\.1\.12,<0\.5'"):
        VerifiersEnvironment("quiz")
    monkeypatch.setitem(sys.modules, "verifiers.v1", ModuleType("verifiers.v1"))
    with pytest.raises(UsageError, match=r"unknown kind .* pip install 'verifiers>=0\.1\.12,<0\.5'"):
        VerifiersEnvironment("quiz")
