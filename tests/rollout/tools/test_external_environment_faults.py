"""What the connectors to TextArena and OpenEnv use of those, by hand: for what real ones do not do when asked."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace

import pytest

from miles.core.errors import UsageError
from miles.core.types import Prompt
from miles.rollout.tools.environments.openenv import OpenEnvEnvironment
from miles.rollout.tools.environments.text_games import TextArenaGame, derive_game_seed
from miles.rollout.tools.tool import EnvironmentFailed

PROMPT = Prompt(id=5, messages=({"role": "system", "content": "Play."},))


async def played(game, replies, prompt=PROMPT):
    """What was shown at first and after each reply, and the last step."""
    try:
        shown = [(await game.open(prompt)).messages[-1]["content"]]
        for reply in replies:
            step = await game.step({"role": "assistant", "content": reply})
            shown += [message["content"] for message in step.messages]
            if step.done:
                return shown, step
        return shown, None
    finally:
        await game.close()


def play(game, replies, prompt=PROMPT):
    return asyncio.run(played(game, replies, prompt))


class Race(ModuleType):
    """TextArena's calls, around a race to ten."""

    ObservationType = SimpleNamespace(PROMPT=1)
    envs = SimpleNamespace(registration=SimpleNamespace(ENV_REGISTRY={"Race-v0": None}))

    def make(self, game, **settings):
        return self

    def reset(self, *, num_players, seed):
        self.total, self.turn, self.slots, self.rules = 0, 0, num_players, "Race to ten.\n"
        reported = [(-1, "Race to ten.", 1)]
        self.state = SimpleNamespace(observations=dict.fromkeys(range(num_players), reported))

    def get_observation(self):
        if self.slots == 1:  # all of the game so far
            self.rules += f"The total is {self.total}.\n"
            return 0, self.rules
        return self.turn % self.slots, [(-1, f"The total is {self.total}.", None)]

    def step(self, *, action):
        self.total += int(action)
        self.turn += 1
        return self.total >= 10, {}

    def close(self):
        winner = (self.turn - 1) % self.slots
        return {slot: 1 if slot == winner else -1 for slot in range(self.slots)}, {}


def test_a_game_of_textarenas_kind_is_played_to_its_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", Race("textarena"))
    shown, last = play(TextArenaGame("Race-v0"), ["6", "6"])
    assert shown == ["Race to ten.\nThe total is 0.", "The total is 6."] and last.reward == 1.0
    shown, last = play(TextArenaGame("Race-v0", num_players=2), ["6", "6"])
    assert shown[1] == "[Player 1]\nThe total is 6." and last.reward == -1.0


def test_a_package_that_is_not_there_is_named_with_its_installation(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UsageError, match=r"needs textarena, which is not installed; pip install miles-rl\["):
        play(TextArenaGame("Wordle-v0"), [])


@asynccontextmanager
async def by_hand(pinged: asyncio.Event):
    """Echoes and counts, three steps a game; says ``secret`` to nobody, fails on ``bad`` and hangs up on ``bye``."""
    web = pytest.importorskip("aiohttp.web")

    def answered(game, verb, data):
        if verb == "reset":
            game.update(steps=0)
            return {"observation": {"text": f"seed {data['seed']}", "metadata": {"secret": 7}}, "done": False}
        game["steps"] += 1
        return {"observation": {"text": f"you said {data['message']}"}, "reward": 0.5, "done": game["steps"] == 3}

    async def socket(request):
        game, ws = {}, web.WebSocketResponse(autoping=False)
        await ws.prepare(request)
        async for message in ws:
            if message.type.name == "PONG":
                pinged.set()
                continue
            asked = json.loads(message.data)
            said = asked.get("data", {}).get("message")
            if asked["type"] == "close" or said == "bye":
                break
            if said == "bad":
                await ws.send_json({"type": "error", "data": {"message": "it broke", "code": "EXECUTION_ERROR"}})
                continue
            await ws.send_json({"type": "observation", "data": answered(game, asked["type"], asked["data"])})
            await ws.ping()
        await ws.close()
        return ws

    game = {}

    async def post(request):
        verb, data = request.match_info["verb"], await request.json()
        if verb == "step" and data["action"]["message"] == "bad":
            return web.Response(status=500, text="it broke")
        return web.json_response(answered(game, verb, data if verb == "reset" else data["action"]))

    app = web.Application()
    app.router.add_get("/ws", socket)
    app.router.add_post("/{verb}", post)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def at_hand(work):
    async def working():
        pinged = asyncio.Event()
        async with by_hand(pinged) as address:
            return await work(address, pinged)

    return asyncio.run(working())


@pytest.mark.parametrize("posts", [False, True])
def test_a_server_with_a_game_of_its_own_is_played_over_both_its_doors(posts):
    async def work(address, _):
        shown, last = await played(OpenEnvEnvironment(address, observation="text", posts=posts), ["a", "b", "c"])
        assert shown == [f"seed {derive_game_seed(PROMPT)}", "you said a", "you said b"] and last.reward == 0.5
        shown, _ = await played(OpenEnvEnvironment(address, action="", posts=posts), ['{"message": "x"}', "y"])
        assert shown[0] == json.dumps({"text": f"seed {derive_game_seed(PROMPT)}"}), "metadata are not the player's"
        assert shown[1:] == ['{"text": "you said x"}', '{"text": "you said y"}']
        with pytest.raises(EnvironmentFailed, match=r"refused step: .*it broke"):
            await played(OpenEnvEnvironment(address, posts=posts), ["bad"])
        with pytest.raises(EnvironmentFailed, match="no answer in time"):
            await played(OpenEnvEnvironment(address, seconds=1e-9, posts=posts), ["a"])

    at_hand(work)


def test_a_server_that_asks_whether_anybody_is_there_is_answered_while_the_policy_thinks():
    async def work(address, pinged):
        game = OpenEnvEnvironment(address, observation="text")
        try:
            await game.open(PROMPT)
            async with asyncio.timeout(60):
                await pinged.wait()  # the game is not asked anything meanwhile
            return await game.step({"role": "assistant", "content": "a"})
        finally:
            await game.close()

    assert at_hand(work).messages[0]["content"] == "you said a"


def test_a_server_that_hangs_up_fails_the_trajectory_and_leaves_nothing_running():
    async def work(address, _):
        with pytest.raises(EnvironmentFailed, match=r"hung up at step \(code 1000\)"):
            await played(OpenEnvEnvironment(address), ["bye"])
        return {task.get_coro().__qualname__ for task in asyncio.all_tasks()}

    assert "_Line._read" not in at_hand(work)


def test_a_server_that_is_not_there_fails_the_trajectory_and_no_address_the_run():
    pytest.importorskip("aiohttp")
    for posts in (False, True):
        with pytest.raises(EnvironmentFailed, match=r"127\.0\.0\.1:9"):
            play(OpenEnvEnvironment("http://127.0.0.1:9", seconds=5.0, posts=posts), [])
    with pytest.raises(UsageError, match="needs an http or ws address"):
        OpenEnvEnvironment("file:///etc/passwd")
