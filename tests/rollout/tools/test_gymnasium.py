"""Gymnasium's own games as an environment: discrete actions, rendering to text, and what is refused."""

import asyncio

import pytest

from miles.core.errors import DataError, UsageError
from miles.core.types import Prompt
from miles.rollout.tools.environments.text_games import (
    GymnasiumGame,
    derive_game_seed,
    describe_action_space,
    parse_action,
)

PROMPT = Prompt(id=5, messages=({"role": "system", "content": "Play."},))
LAKE = {"game": "FrozenLake-v1", "settings": {"is_slippery": False, "render_mode": "ansi"}}
DOWN, RIGHT = "1", "2"
WAY = [DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT]  # around the holes of the 4 x 4 map


def play(game, replies):
    async def played():
        try:
            opening = await game.open(PROMPT)
            return opening, [await game.step({"role": "assistant", "content": reply}) for reply in replies]
        finally:
            await game.close()

    return asyncio.run(played())


@pytest.fixture
def gymnasium():
    return pytest.importorskip("gymnasium")


def test_a_real_game_is_won_by_the_numbers_of_its_actions(gymnasium):
    opening, steps = play(GymnasiumGame(**LAKE), WAY)
    shown = opening.messages[-1]["content"]
    assert opening.provides_reward and shown.startswith("[S]FFF\nFHFH")
    assert shown.endswith("An action is a whole number from 0 to 3, as in <action>0</action>.")
    assert steps[0].messages[0]["content"].splitlines()[1:3] == ["SFFF", "[F]HFH"]
    assert [step.reward for step in steps] == [0.0] * 5 + [1.0]
    assert [step.done for step in steps] == [False] * 5 + [True] and steps[-1].limit is None


def test_the_same_steps_give_what_gymnasium_gives(gymnasium):
    """The game by hand is the oracle: Taxi's observations and rewards, with the seed of the prompt."""
    actions = [0, 3, 1, 2, 4, 5]
    name = "Taxi-v4" if "Taxi-v4" in gymnasium.registry else "Taxi-v3"
    _, steps = play(GymnasiumGame(name), map(str, actions))
    game = gymnasium.make(name)
    game.reset(seed=derive_game_seed(PROMPT))
    expected = [game.step(action) for action in actions]
    assert [step.messages[0]["content"] for step in steps] == [str(each[0]) for each in expected]
    assert [step.reward for step in steps] == [float(each[1]) for each in expected]


@pytest.mark.parametrize("reply", ["4", "-1", "left", "", "1.5"])
def test_what_is_no_action_is_answered_and_moves_nothing(gymnasium, reply):
    _, steps = play(GymnasiumGame(**LAKE), [reply, *WAY])
    assert "is not an action. An action is a whole number from 0 to 3" in steps[0].messages[0]["content"]
    assert steps[0].reward == 0.0 and not steps[0].done
    assert steps[-1].reward == 1.0


def test_a_game_that_is_cut_off_says_so(gymnasium):
    settings = {"is_slippery": False, "max_episode_steps": 2}
    _, steps = play(GymnasiumGame("FrozenLake-v1", settings=settings), ["0", "0"])
    assert (steps[-1].done, steps[-1].limit) == (True, "game")


def test_other_spaces_of_whole_numbers_and_text_are_read(gymnasium):
    spaces = gymnasium.spaces
    assert parse_action("7", spaces.Discrete(3, start=5)) == 7
    assert parse_action("1, 4", spaces.MultiDiscrete([2, 5])).tolist() == [1, 4]
    assert parse_action("1 0 1", spaces.MultiBinary(3)).tolist() == [1, 0, 1]
    assert parse_action("go", spaces.Text(4)) == "go"
    assert "2 whole numbers (0 to 1, 0 to 4), as in <action>0 0</action>" in (
        describe_action_space(spaces.MultiDiscrete([2, 5]))
    )
    for word, space in (
        ("5", spaces.Discrete(3)),
        ("1 5", spaces.MultiDiscrete([2, 5])),
        ("much too long", spaces.Text(4)),
    ):
        with pytest.raises(ValueError):
            parse_action(word, space)


def test_a_game_of_real_numbers_needs_words_for_its_actions(gymnasium):
    with pytest.raises(UsageError, match=r"this game has Box.*map words to its actions with actions"):
        play(GymnasiumGame("Pendulum-v1"), [])
    _, steps = play(GymnasiumGame("Pendulum-v1", actions={"push": [1.0]}), ["push"])
    assert steps[0].reward is not None and steps[0].reward < 0.0


def test_a_game_that_is_not_there_is_the_row_s_fault(gymnasium):
    with pytest.raises(DataError, match="gymnasium has no game FrozenLak-v1"):
        play(GymnasiumGame("FrozenLak-v1"), [])


def test_without_the_package_the_extra_is_named(monkeypatch):
    def missing(name, *_):
        raise ModuleNotFoundError(f"No module named {name}", name=name)

    monkeypatch.setattr("miles.rollout.tools.environment.import_module", missing)
    with pytest.raises(UsageError, match=r"needs gymnasium, which is not installed; pip install 'miles-rl\[environm"):
        play(GymnasiumGame("FrozenLake-v1"), [])
