"""Text games: Gymnasium environments with text observations and actions, and TextArena games.

Their calls block, so each runs in a thread; a call that never returns keeps its thread.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import numpy as np

from miles.core.errors import DataError, UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.seeds import mix
from miles.rollout.tools.environment import OpenResult, StepResult, import_package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_OPEN, _CLOSE = "<action>", "</action>"
_HIGHLIGHTED = re.compile(r"\x1b\[[1-9][0-9;]*m(\S)\x1b\[0m")
_TERMINAL_CODE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RANDOM_LOCK = threading.Lock()
"""Held while Python's global random generator is replaced."""


def extract_action(reply: Message) -> str:
    """The action in a reply: the last text between ``<action>`` tags, else all text after the thinking.

    >>> extract_action({"content": "Left is a wall. <action>go right</action>"})
    'go right'
    """
    said = str(reply.get("content") or "").rpartition("</think>")[2]
    tagged = re.findall(f"{_OPEN}(.*?){_CLOSE}", said, re.DOTALL)
    return (tagged[-1] if tagged else said).strip()


def derive_game_seed(prompt: Prompt) -> int:
    """The seed of a prompt's game: the same for every trajectory and every epoch."""
    given = prompt.metadata.get("seed")
    return given if isinstance(given, int) else mix(prompt.id) & 0x7FFFFFFF


class GymnasiumGame:
    """``game`` is an id for ``gymnasium.make``, or ``make`` what makes an object with its reset and step.

    The first observation follows the prompt's messages. An observation that is not text is shown as ``str`` formats
    it, or as the game renders it with ``render_mode`` ansi. Actions are text, numbers of a discrete space, or words
    that ``actions`` maps to actions of any other space. ``settings`` go to ``gymnasium.make``.
    """

    def __init__(
        self,
        game: str = "",
        *,
        settings: Mapping[str, Any] = EMPTY,
        actions: Mapping[str, Any] | None = None,
        make: Callable[[], Any] | None = None,
    ) -> None:
        if make is None and not game:
            raise UsageError("The environment gymnasium needs the id of a game; write it as game.")
        self._make = make or partial(_make_gymnasium_game, game, settings)
        self._actions = actions
        self._space: Any = None
        self._game: Any = None

    async def open(self, prompt: Prompt) -> OpenResult:
        self._game = await asyncio.to_thread(self._make)
        # an object of ``make`` need not have a space; its actions are text
        self._space = getattr(self._game, "action_space", None) if self._actions is None else None
        rules = describe_action_space(self._space)
        observation, _ = await asyncio.to_thread(self._game.reset, seed=derive_game_seed(prompt))
        first = "\n".join(filter(None, (await self._show(observation), rules)))
        return OpenResult(messages=(*prompt.messages, _user(first)), provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        word = extract_action(reply)
        try:
            action = parse_action(word, self._space) if self._actions is None else self._actions[word]
        except KeyError:
            known = ", ".join(self._actions or ())
            return StepResult(messages=[_user(f"{word!r} is not an action; there are {known}.")], reward=0.0)
        except ValueError:
            rules = describe_action_space(self._space)
            return StepResult(messages=[_user(f"{word!r} is not an action. {rules}")], reward=0.0)
        observation, reward, ended, cut_off, _ = await asyncio.to_thread(self._game.step, action)
        if ended or cut_off:
            return StepResult(reward=float(reward), done=True, limit=None if ended else "game")
        return StepResult(messages=[_user(await self._show(observation))], reward=float(reward))

    async def close(self) -> None:
        if self._game is not None:
            await asyncio.to_thread(self._game.close)

    async def _show(self, observation: Any) -> str:
        """The observation as text, or the game as it renders itself to a terminal."""
        if getattr(self._game, "render_mode", None) != "ansi":
            return _last_text(observation)
        text = str(await asyncio.to_thread(self._game.render))
        return _TERMINAL_CODE.sub("", _HIGHLIGHTED.sub(r"[\1]", text)).strip("\n")


def describe_action_space(space: Any) -> str:
    """How an action of a space is written; empty where it is any text. UsageError for a space of other actions."""
    kind = type(space).__name__
    if space is None or kind == "Text":
        return ""
    if kind == "Discrete":
        first, last = int(space.start), int(space.start + space.n - 1)
        return f"An action is a whole number from {first} to {last}, as in {_OPEN}{first}{_CLOSE}."
    if kind in ("MultiDiscrete", "MultiBinary") and len(space.shape) == 1:
        first, last = _bounds(space)
        ranges = ", ".join(f"{low} to {high}" for low, high in zip(first, last, strict=True))
        example = " ".join(map(str, first))
        return f"An action is {len(first)} whole numbers ({ranges}), as in {_OPEN}{example}{_CLOSE}."
    raise UsageError(
        f"The environment gymnasium takes text and whole numbers as actions, and this game has {space}; map words to "
        "its actions with actions."
    )


def parse_action(word: str, space: Any) -> Any:
    """The action that a reply names in a space; ValueError when it is none."""
    kind = type(space).__name__
    if space is None:
        return word
    if kind == "Text":
        action: Any = word
    elif kind == "Discrete":
        action = int(word)
    else:
        action = np.array([int(number) for number in word.replace(",", " ").split()], dtype=space.dtype)
    if not space.contains(action):
        raise ValueError(word)
    return action


def _bounds(space: Any) -> tuple[list[int], list[int]]:
    """The first and the last value of each number of a MultiDiscrete or MultiBinary space."""
    if type(space).__name__ == "MultiBinary":
        return [0] * int(space.shape[0]), [1] * int(space.shape[0])
    first = [int(start) for start in space.start]
    return first, [start + int(count) - 1 for start, count in zip(first, space.nvec, strict=True)]


def _make_gymnasium_game(name: str, settings: Mapping[str, Any]) -> Any:
    gymnasium = import_package("gymnasium", environment="gymnasium", install="'miles-rl[environments]'")
    try:
        return gymnasium.make(name, **settings)
    except gymnasium.error.UnregisteredEnv as error:
        raise DataError(f"gymnasium has no game {name}: {error}") from error


class TextArenaGame:
    """``game`` is an id for ``textarena.make``. The policy is player ``player_id``, and plays every other player too.

    With several players it is self-play, where observations name the player; the reward is that of ``player_id``. Games
    use Python's global generator: moves run one at a time per process, each game with a generator state of its own.
    """

    def __init__(
        self, game: str, *, num_players: int = 1, player_id: int = 0, settings: Mapping[str, Any] = EMPTY
    ) -> None:
        if not 0 <= player_id < num_players:
            raise UsageError(
                f"The environment textarena has no player {player_id} of {num_players}; they are counted from 0."
            )
        self._name = game
        self._num_players = num_players
        self._player_id = player_id
        self._settings = settings
        self._game: Any = None
        self._random_state: Any = None
        self._rules: dict[int, str] = {}
        self._last_text: dict[int, str] = {}

    async def open(self, prompt: Prompt) -> OpenResult:
        arena = import_package("textarena", environment="textarena", install="miles-rl[environments]")
        known = arena.envs.registration.ENV_REGISTRY
        if self._name not in known:
            close = get_close_matches(self._name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "write one of textarena's ids, as in GuessTheNumber-v0."
            raise DataError(f"Prompt {prompt.id}: textarena has no game {self._name}; {hint}")

        def begin() -> Any:
            game = arena.make(self._name, **self._settings)
            game.reset(num_players=self._num_players, seed=derive_game_seed(prompt))
            return game

        self._random_state = random.Random(derive_game_seed(prompt)).getstate()
        self._game = await asyncio.to_thread(self._run_seeded, begin)
        rules = arena.ObservationType.PROMPT
        for player, observations in self._game.state.observations.items():
            self._rules[player] = "".join(text for _, text, kind in observations if kind is rules)
        return OpenResult(messages=(*prompt.messages, _user(await self._observe())), provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        done, _ = await asyncio.to_thread(self._run_seeded, lambda: self._game.step(action=extract_action(reply)))
        if not done:
            return StepResult(messages=[_user(await self._observe())])
        rewards, _ = await asyncio.to_thread(self._game.close)
        self._game = None
        if not rewards or self._player_id not in rewards:
            raise EnvironmentFailed(f"{self._name} gave no reward to player {self._player_id}")
        return StepResult(reward=float(rewards[self._player_id]), done=True)

    async def close(self) -> None:
        if self._game is not None:
            await asyncio.to_thread(self._game.close)

    def _run_seeded(self, move: Callable[[], Any]) -> Any:
        """Run ``move`` with this game's generator state, and restore the global one."""
        with _RANDOM_LOCK:
            before = random.getstate()
            random.setstate(self._random_state)
            try:
                return move()
            finally:
                self._random_state = random.getstate()
                random.setstate(before)

    async def _observe(self) -> str:
        player, observation = await asyncio.to_thread(self._game.get_observation)
        text = observation if isinstance(observation, str) else "\n".join(_observation_texts(observation))
        text, self._last_text[player] = self._new_text(player, text), text
        return text if self._num_players == 1 else f"[Player {player}]\n{text}"

    def _new_text(self, player: int, text: str) -> str:
        """The new part of an observation, which may repeat the whole game, or its rules and a board.

        Where nothing is new, as after a move that the game rejects silently, it is the whole observation.
        """
        before = self._last_text.get(player)
        if before is None:
            return text.strip()
        if text.startswith(before):
            return text.removeprefix(before).strip() or text.strip()
        return text.removeprefix(self._rules.get(player, "")).strip()


def _observation_texts(observation: Sequence[Any]) -> list[str]:
    """The texts of unwrapped observations: (sender, text, kind)."""
    return [str(entry[1]) if isinstance(entry, tuple) and len(entry) > 1 else str(entry) for entry in observation]


def _last_text(observation: Any) -> str:
    return observation if isinstance(observation, str) else str(observation)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
