"""Connectors to other people's worlds, on small ones of our own and on the real packages where they are installed."""

import asyncio
import json
import sys
from types import ModuleType

import pytest

from miles.core.errors import UsageError
from miles.core.types import Prompt
from miles.rollout.source import read_dataset
from miles.rollout.tools.environments.openenv import OpenEnvEnvironment
from miles.rollout.tools.environments.textgame import GymnasiumGame, TextArenaGame, action_of, seed_of
from miles.rollout.tools.tool import EnvironmentFailed

PROMPT = Prompt(id=5, messages=({"role": "system", "content": "Guess the number."},), label="7")


def says(text):
    return {"role": "assistant", "content": text}


async def played(world, replies, prompt=PROMPT):
    """What the world showed at each turn, and the steps."""
    try:
        opening = await world.open(prompt)
        steps = []
        for reply in replies:
            steps.append(await world.step(reply(opening, steps) if callable(reply) else says(reply)))
            if steps[-1].done:
                break
        return opening, steps
    finally:
        await world.close()


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
    number = seed_of(PROMPT) % 7 + 1
    wrong = "1" if number > 1 else "2"
    world = GymnasiumGame(make=lambda: game)
    opening, steps = asyncio.run(played(world, [wrong, f"I think <action> {number} </action>"]))
    assert opening.messages[1]["content"].startswith("A number from 1 to 7") and opening.scores
    assert [step.messages[0]["content"] if step.messages else "" for step in steps] == (
        ["higher" if number > 1 else "lower", ""]
    )
    assert [(step.reward, step.done, step.limit) for step in steps] == [(0.0, False, None), (1.0, True, None)]
    assert game.closed == 1


def test_a_game_that_is_cut_off_or_breaks_says_so():
    number = seed_of(PROMPT) % 7 + 1
    wrong = "1" if number > 1 else "2"
    _, steps = asyncio.run(played(GymnasiumGame(make=Guessing), [wrong] * 4))
    assert (steps[-1].done, steps[-1].limit) == (True, "game")
    with pytest.raises(TypeError, match="not a number"):  # which the loop makes a failed attempt of
        asyncio.run(played(GymnasiumGame(make=Guessing), ["seven"]))
    _, steps = asyncio.run(played(GymnasiumGame(make=Guessing, actions={"low": "1"}), ["high"]))
    assert "'high' is not an action; there are low" in steps[0].messages[0]["content"]


def test_attempts_at_a_prompt_play_the_same_game():
    assert seed_of(PROMPT) == seed_of(Prompt(id=5, messages=(), epoch=3)) != seed_of(Prompt(id=6, messages=()))
    assert seed_of(Prompt(id=5, messages=(), metadata={"seed": 11})) == 11


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
    assert action_of({"content": reply}) == action


class Arena(ModuleType):
    """TextArena's calls, as its documentation has them, around a race to ten."""

    def make(self, game, **settings):
        assert game == "Race-v0"
        return self

    def reset(self, *, num_players, seed):
        self.total, self.turn, self.seats, self.told = 0, 0, num_players, "Race to ten.\n"

    def get_observation(self):
        if self.seats == 1:  # all of the game so far
            self.told += f"The total is {self.total}.\n"
            return 0, self.told
        return self.turn % self.seats, [(-1, f"The total is {self.total}.", None)]

    def step(self, *, action):
        self.total += int(action)
        self.turn += 1
        return self.total >= 10, {}

    def close(self):
        winner = (self.turn - 1) % self.seats
        return {seat: 1 if seat == winner else -1 for seat in range(self.seats)}, {}


def test_a_game_of_textarenas_kind_is_played_to_its_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", Arena("textarena"))
    opening, steps = asyncio.run(played(TextArenaGame("Race-v0"), ["6", "6"]))
    assert opening.messages[-1]["content"] == "Race to ten.\nThe total is 0."
    assert steps[0].messages[0]["content"] == "The total is 6."
    assert (steps[-1].reward, steps[-1].done) == (1.0, True)
    opening, steps = asyncio.run(played(TextArenaGame("Race-v0", seats=2), ["6", "6"]))
    assert steps[0].messages[0]["content"] == "[Player 1]\nThe total is 6." and steps[-1].reward == -1.0


def test_a_package_that_is_not_there_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UsageError, match="needs textarena, which is not installed; pip install textarena"):
        asyncio.run(played(TextArenaGame("Wordle-v0"), []))


def test_reasoning_gyms_own_scorers_say_what_is_right():
    pytest.importorskip("reasoning_gym")
    from miles.rollout.tools.environments.reasoning import ReasoningGym

    prompt = read_dataset("reasoning_gym:leg_counting?size=2&seed=1", input_key="input").prompts[0]
    right = f"<answer>{prompt.label}</answer>"

    async def play():
        return (
            await played(ReasoningGym(), [right], prompt),
            await played(ReasoningGym(tries=3, price=0.25), ["no idea", right], prompt),
            await played(ReasoningGym(tries=1), ["-5"], prompt),
        )

    (opening, once), (_, twice), (_, never) = asyncio.run(play())
    assert opening.messages == prompt.messages and opening.scores
    assert (once[0].reward, once[0].done, once[0].parts) == (1.0, True, {"right": 1.0})
    assert [step.done for step in twice] == [False, True] and twice[1].reward == 0.75
    assert never[0].done and never[0].reward is not None and never[0].reward < 1.0


# -- verifiers: a stand-in with the package's calls, driven by OpenAI's real client ----------


class Verifiers(ModuleType):
    """What the connector uses of the package, with a quiz for an environment."""

    def load_environment(self, id, **settings):
        return Quiz(id, **settings)


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


@pytest.fixture
def verifiers(monkeypatch):
    pytest.importorskip("openai")
    pytest.importorskip("httpx")
    monkeypatch.setitem(sys.modules, "verifiers", Verifiers("verifiers"))
    from miles.rollout.tools.environments import verifiers as connector

    connector._loaded.cache_clear()
    return connector.VerifiersEnvironment


def test_an_environment_of_verifiers_drives_itself_and_is_scored_by_its_rubric(verifiers):
    opening, steps = asyncio.run(played(verifiers("quiz"), ["7", "8"]))
    assert opening.messages == [{"role": "system", "content": "Guess the number."}]
    assert opening.tools[0]["function"]["name"] == "peek" and opening.scores
    assert [dict(message) for message in steps[0].messages] == [{"role": "user", "content": "Question 2?"}]
    assert not steps[0].anew
    assert (steps[1].done, steps[1].reward, steps[1].parts) == (True, 0.5, {"right": 1.0})


def test_an_environment_that_rewrites_the_conversation_begins_it_anew(verifiers):
    _, steps = asyncio.run(played(verifiers("quiz", settings={"forgetful": True}), ["7", "7"]))
    assert steps[0].anew and steps[0].messages == [{"role": "user", "content": "Question 2?"}]
    assert steps[1].reward == 1.0


def test_what_an_environment_of_verifiers_raises_comes_out_and_nothing_is_left_running(verifiers):
    with pytest.raises(RuntimeError, match="the quiz is off"):
        asyncio.run(played(verifiers("quiz", settings={"breaks": True}), ["7"]))

    async def leave():
        world = verifiers("quiz")
        await world.open(PROMPT)
        await world.close()
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(leave()) == []


def test_a_verifiers_without_environments_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers", ModuleType("verifiers"))
    from miles.rollout.tools.environments.verifiers import VerifiersEnvironment

    with pytest.raises(UsageError, match="has no load_environment"):
        VerifiersEnvironment("quiz")


# -- OpenEnv: a server with its two ways to be asked -----------------------------------------


async def served(work):
    """Echoes and counts, three steps a game, over a WebSocket and by POST."""
    web = pytest.importorskip("aiohttp.web")

    def answered(game, verb, data):
        if verb == "reset":
            game.update(steps=0, seed=data.get("seed"))
            return {"observation": {"text": f"seed {game['seed']}"}, "reward": None, "done": False}
        game["steps"] += 1
        seen = {"text": f"you said {data['message']}"}
        return {"observation": seen, "reward": 0.5, "done": game["steps"] == 3}

    async def socket(request):
        game, ws = {}, web.WebSocketResponse()
        await ws.prepare(request)
        async for message in ws:
            asked = json.loads(message.data)
            if asked["type"] == "close":
                break
            if asked["data"].get("message") == "bad":
                await ws.send_json({"type": "error", "data": {"message": "no such move", "code": "X"}})
                continue
            await ws.send_json({"type": "observation", "data": answered(game, asked["type"], asked["data"])})
        return ws

    game = {}

    async def post(request):
        verb, data = request.match_info["verb"], await request.json()
        if verb == "step" and data["action"]["message"] == "bad":
            return web.Response(status=422, text="no such move")
        return web.json_response(answered(game, verb, data if verb == "reset" else data["action"]))

    app = web.Application()
    app.router.add_get("/ws", socket)
    app.router.add_post("/{verb}", post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        return await work(f"127.0.0.1:{port}")
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("scheme", ["http://{}", "ws://{}/ws"])
def test_a_served_environment_is_played_over_both_its_doors(scheme):
    async def work(host):
        world = OpenEnvEnvironment(scheme.format(host), observation="text", reset={"level": 1})
        opening, steps = await played(world, ["a", "b", "c"])
        with pytest.raises(EnvironmentFailed, match=r"refused step: .*no such move"):
            await played(OpenEnvEnvironment(scheme.format(host), observation="text"), ["bad"])
        with pytest.raises(EnvironmentFailed, match="no answer in time"):
            await played(OpenEnvEnvironment(scheme.format(host), observation="text", seconds=1e-9), ["a"])
        return opening, steps

    opening, steps = asyncio.run(served(work))
    assert opening.messages[-1] == {"role": "user", "content": f"seed {seed_of(PROMPT)}"} and opening.scores
    assert steps[0].messages[0]["content"] == "you said a"
    assert [(step.reward, step.done) for step in steps] == [(0.5, False), (0.5, False), (0.5, True)]


def test_a_server_that_is_not_there_fails_the_attempt_and_no_address_the_run():
    for url in ("http://127.0.0.1:9", "ws://127.0.0.1:9/ws"):
        with pytest.raises(EnvironmentFailed, match=r"127\.0\.0\.1:9"):
            asyncio.run(played(OpenEnvEnvironment(url, seconds=5.0), []))
    with pytest.raises(UsageError, match="needs an http or ws address"):
        OpenEnvEnvironment("file:///etc/passwd")
