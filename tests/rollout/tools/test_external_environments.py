"""TextArena's games and OpenEnv's servers: the real packages, and the example that trains in both."""

import asyncio
import random
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib.util import module_from_spec, spec_from_file_location
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from tests.rollout.generate.scripted_engine import Scripted

from miles.core.errors import DataError, UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Prompt, Status
from miles.launch.build.generation import build_generation
from miles.launch.build.models import read_policy
from miles.launch.main import main
from miles.launch.read_config import read
from miles.models.tokenizer import load_tokenizer
from miles.rollout.tools.environments.openenv import OpenEnvEnvironment
from miles.rollout.tools.environments.text_games import TextArenaGame, derive_game_seed
from miles.rollout.tools.tool import EnvironmentFailed

EXAMPLE = Path(__file__).parents[3] / "examples" / "external_environments"
PROMPT = Prompt(id=5, messages=({"role": "system", "content": "Play."},))


def load_module(name: str, path: Path) -> ModuleType:
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = load_module("external_environments_environment", EXAMPLE / "environment.py")
with pytest.MonkeyPatch.context() as patch:  # another example has a file of that name too
    patch.setitem(sys.modules, "environment", environment)
    patch.syspath_prepend(EXAMPLE)
    run = load_module("external_environments_run", EXAMPLE / "run.py")


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


# -- TextArena ---------------------------------------------------------------------------------


@pytest.fixture
def arena() -> ModuleType:
    return pytest.importorskip("textarena")


def number_behind(seed: int, most: int) -> int:
    return random.Random(seed).randint(1, most)


def test_a_real_game_for_one_is_played_to_its_end(arena):
    number = number_behind(derive_game_seed(PROMPT), 20)
    wrong = 1 if number > 1 else 2
    shown, last = play(TextArenaGame("GuessTheNumber-v0"), [str(wrong), f"I say <action>[{number}]</action>"])
    assert "between 1 and 20 within 10 turns" in shown[0]
    hint = "higher" if number > wrong else "lower"
    assert shown[1:] == [f"[Player] [{wrong}]\n[GAME] The target number is {hint}."], "only what is new"
    assert last is not None and last.reward == 1.0


def test_settings_reach_the_game_and_its_own_score_counts(arena):
    settings = {"min_number": 1, "max_number": 5, "max_turns": 1}
    number = number_behind(derive_game_seed(PROMPT), 5)
    first, second = [n for n in range(1, 6) if n != number][:2]
    shown, last = play(TextArenaGame("GuessTheNumber-v0", settings=settings), [str(first), str(second)])
    assert "between 1 and 5" in shown[0]
    assert last is not None and last.reward == 1 - abs(second - number) / 4, "how near it came"


def test_rules_are_said_once_where_a_game_repeats_them_before_every_board(arena):
    shown, last = play(TextArenaGame("Nim-v0-train", num_players=2, settings={"piles": [1, 2]}), ["0 1", "1 1"])
    assert last is None and "pile 1: 2" in shown[0]
    assert all("Rules:" in text for text in shown[:2]), "each player is shown them"
    assert "Rules:" not in shown[2] and shown[2].endswith("pile 0: 0\n  pile 1: 1")


def test_a_move_that_is_refused_without_a_word_leaves_no_empty_message(arena):
    shown, last = play(TextArenaGame("GuessTheNumber-v0-train"), ["seven"])
    assert last is None and shown[1] == shown[0] and "Guess The Number" in shown[0]


@pytest.mark.parametrize("slot", [0, 1])
def test_the_policy_plays_both_slots_and_earns_what_its_own_does(arena, slot):
    game = TextArenaGame("Nim-v0", num_players=2, player_id=slot, settings={"piles": [1, 1]})
    shown, last = play(game, ["0 1", "1 1"])
    assert [text.splitlines()[0] for text in shown] == ["[Player 0]", "[Player 1]"]
    assert last is not None and last.reward == (-1.0, 1.0)[slot], "who takes the last one wins"


def test_games_at_once_do_not_disturb_each_other_nor_the_process(arena):
    """Bandits draw from Python's own generator at every move."""
    moves, prompts = ["red", "blue", "red", "green", "blue"], [Prompt(id=n, messages=()) for n in range(4)]
    alone = [play(TextArenaGame("Bandit-v0"), moves, prompt)[0] for prompt in prompts]
    random.seed(7)
    before = random.getstate()

    async def all_at_once():
        return await asyncio.gather(*(played(TextArenaGame("Bandit-v0"), moves, prompt) for prompt in 8 * prompts))

    assert [shown for shown, _ in asyncio.run(all_at_once())] == 8 * alone
    assert random.getstate() == before and len({tuple(shown) for shown in alone}) > 1


def test_a_game_that_is_not_there_and_a_slot_that_is_not_are_named(arena):
    with pytest.raises(DataError, match=r"textarena has no game GuesTheNumber-v0; did you mean GuessTheNumber-v0\?"):
        play(TextArenaGame("GuesTheNumber-v0"), [])
    with pytest.raises(UsageError, match="has no player 2 of 2"):
        TextArenaGame("Nim-v0", num_players=2, player_id=2)


# -- OpenEnv: the example's server, which is the package's own ----------------------------------


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("openenv.core.env_server")
    pytest.importorskip("aiohttp")
    with environment.served() as address:
        yield address


def walking(url: str, **settings) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(url, action="move", observation="text", **settings)


def way(opening: str) -> list[str]:
    """The moves of a shortest way."""
    here, chest = opening[:2], opening[-2:]
    across, up = ord(chest[0]) - ord(here[0]), int(chest[1]) - int(here[1])
    return abs(across) * ["east" if across > 0 else "west"] + abs(up) * ["north" if up > 0 else "south"]


@pytest.mark.parametrize("address", ["{}", "{}/", "{}/ws"])
def test_a_real_server_is_played_by_any_of_its_addresses(url, address):
    address = address.format(url.replace("http", "ws", 1) if address.endswith("ws") else url)
    (opening,), _ = play(walking(address), [])
    moves = way(opening)
    shown, last = play(walking(address), moves)
    assert shown[0] == opening, "a prompt's game is the same each time"
    assert last is not None and (last.reward, len(shown)) == (1.0, len(moves))
    back = {"east": "west", "west": "east", "north": "south", "south": "north"}[moves[0]]
    _, last = play(walking(address), [moves[0], back, *moves])
    assert len(moves) == 1 or (last is not None and last.reward == len(moves) / (len(moves) + 2))


def test_a_prompt_may_choose_its_game(url):
    ours, other = (Prompt(id=5, messages=(), metadata={"reset": {"seed": seed}}) for seed in (3, 4))
    assert play(walking(url), [], ours) == play(walking(url, reset={"seed": 3}), [])
    assert play(walking(url), [], ours) != play(walking(url), [], other)


def test_a_reply_that_is_no_action_is_told_so_and_the_game_goes_on(url):
    (opening,), _ = play(walking(url), [])
    shown, last = play(walking(url), ["upwards", *way(opening)])
    assert shown[1].startswith("Error: Invalid message; move: Input should be 'north', 'south', 'east' or 'west'")
    assert last is not None and last.reward == 1.0, "it cost nothing but the turn"


@pytest.mark.parametrize("posts", [False, True])
def test_a_field_that_actions_do_not_have_stops_the_run(url, posts):
    with pytest.raises(UsageError, match=r"takes no action of a field 'message' \(.*move: Field required"):
        play(OpenEnvEnvironment(url, observation="text", posts=posts), ["north"])


def test_a_post_is_answered_from_a_fresh_board_by_a_real_server(url):
    """Which is why trajectories have a WebSocket unless somebody asks for posts."""
    shown, _ = play(walking(url, posts=True), ["north", "north", "upwards"])
    assert " to " in shown[0] and [seen[:2] for seen in shown[1:3]] == ["a2", "a2"] and "Input should be" in shown[3]


def test_trajectories_wait_for_a_place_on_a_server_that_is_full():
    pytest.importorskip("openenv.core.env_server")
    pytest.importorskip("aiohttp")

    async def three(address):
        games = [played(walking(address), ["north", "south"]) for _ in range(3)]
        return await asyncio.gather(*games)

    async def one_too_many(address):
        first = walking(address)
        try:
            await first.open(PROMPT)
            await played(walking(address, patience=0.0), [])
        finally:
            await first.close()

    with environment.served("1") as address:
        assert len({tuple(shown) for shown, _ in asyncio.run(three(address))}) == 1
        with pytest.raises(EnvironmentFailed, match=r"refused reset: .*capacity"):
            asyncio.run(one_too_many(address))


# -- the example ---------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=environment.KINDS)
def kind(request) -> str:
    pytest.importorskip(request.param)
    return request.param


@pytest.fixture(scope="module")
def start(kind, tmp_path_factory) -> Iterator[tuple[Path, str]]:
    folder = tmp_path_factory.mktemp(kind)
    with environment.served() if kind == "openenv" else nullcontext("") as address:
        environment.write_start(folder, kind, address, shown=32)
        yield folder, address


def few(flags: list[str]) -> list[str]:
    """The same with little to do in a step, and nothing held out."""
    if "--eval-prompt-data" in flags:
        at = flags.index("--eval-prompt-data")
        assert flags[at + 3] == "--eval-interval"
        flags = flags[:at] + flags[at + 5 :]
    small = {"--rollout-batch-size": "4", "--n-samples-per-prompt": "4", "--lr-warmup-iters": "1"}
    return [small.get(before, word) for before, word in zip(["", *flags], flags, strict=False)]


def test_each_environment_is_trained_in(kind, start, tmp_path):
    folder, address = start
    warm, grpo = tmp_path / "warm", tmp_path / "grpo"
    assert main(["train", *few(run.warmup_flags(folder, warm, steps=2))]) == 0
    assert main(["train", *few(run.grpo_flags(kind, folder, address, run.newest(warm), grpo, steps=2))]) == 0
    steps = run.measured(grpo, "train")
    assert len(steps) == 2 and max(row["parity_max_abs"] for row in steps) < 1e-4
    assert max(row["unscored_ratio"] for row in steps) == 0.0, "no environment failed"


def test_an_attempt_has_the_tokens_of_a_demonstration(kind, start, tmp_path):
    folder, address = start
    tokenizer = load_tokenizer(folder)
    prompt = environment.prompt_of(kind, 11)
    player = environment.guess if kind == "textarena" else environment.walk
    shown = asyncio.run(environment.played(environment.environment_of(kind, address), prompt, player, random.Random(3)))
    said = [message["content"] for message in shown if message["role"] == "assistant"]

    async def attempt():
        config, _, _ = read("train", run.grpo_flags(kind, folder, address, folder, tmp_path / "unused", steps=1))
        answering = build_generation(config, read_policy(config))
        try:
            return await answering.generate(prompt, Scripted(tokenizer, said), SamplingParams(max_new_tokens=64))
        finally:
            await answering.close()

    trajectory = asyncio.run(attempt())
    assert trajectory.status is Status.COMPLETED and trajectory.reward is not None, trajectory.metadata
    tokens = list(chain.from_iterable(span.tokens.tolist() for span in trajectory.spans))
    assert tokenizer.apply_chat_template(shown) == [*tokens, *tokenizer.encode("\n")]
    assert tokenizer.encode("?")[0] not in tokens, "every word of the environment is a token"
