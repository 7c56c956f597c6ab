"""Games in text: Gymnasium's reset and step with text for observation and action, and TextArena's.

Their calls do not await, so each is made in a thread; one that does not come back keeps its thread.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from miles.core.errors import DataError, UsageError
from miles.core.types import EMPTY, Prompt
from miles.rollout.seeds import mix
from miles.rollout.tools.environment import Opening, Step
from miles.rollout.tools.environments.package import package
from miles.rollout.tools.tool import EnvironmentFailed, Message

_OPEN, _SHUT = "<action>", "</action>"
_GENERATOR = threading.Lock()
"""Held by whoever has put Python's own generator elsewhere."""


def action_of(reply: Message) -> str:
    """What a reply does: the last text between ``<action>`` tags, else all it says after its thoughts.

    >>> action_of({"content": "Left is a wall. <action>go right</action>"})
    'go right'
    """
    said = str(reply.get("content") or "").rpartition("</think>")[2]
    tagged = re.findall(f"{_OPEN}(.*?){_SHUT}", said, re.DOTALL)
    return (tagged[-1] if tagged else said).strip()


def seed_of(prompt: Prompt) -> int:
    """The game a prompt is about: the same for every attempt at it, and every time the data comes round to it."""
    given = prompt.metadata.get("seed")
    return given if isinstance(given, int) else mix(prompt.id) & 0x7FFFFFFF


class GymnasiumGame:
    """``game`` is an id for ``gymnasium.make``, or ``make`` what makes an object with its reset and step.

    The first observation goes behind the prompt's messages. What observes in something else than text is shown as
    ``str`` has it; ``actions`` maps words to actions of games that take none. ``settings`` go to ``gymnasium.make``.
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
        self._make = make or (
            lambda: package("gymnasium", environment="gymnasium", install="gymnasium").make(game, **settings)
        )
        self._actions = actions
        self._game: Any = None

    async def open(self, prompt: Prompt) -> Opening:
        self._game = await asyncio.to_thread(self._make)
        seen, _ = await asyncio.to_thread(self._game.reset, seed=seed_of(prompt))
        return Opening(messages=(*prompt.messages, _user(_shown(seen))), scores=True)

    async def step(self, reply: Message) -> Step:
        word = action_of(reply)
        if self._actions is not None and word not in self._actions:
            known = ", ".join(self._actions)
            return Step(messages=[_user(f"{word!r} is not an action; there are {known}.")], reward=0.0)
        action = word if self._actions is None else self._actions[word]
        seen, reward, ended, cut_off, _ = await asyncio.to_thread(self._game.step, action)
        if ended or cut_off:
            return Step(reward=float(reward), done=True, limit=None if ended else "game")
        return Step(messages=[_user(_shown(seen))], reward=float(reward))

    async def close(self) -> None:
        if self._game is not None:
            await asyncio.to_thread(self._game.close)


class TextArenaGame:
    """``game`` is an id for ``textarena.make``. The policy is player ``seat``, and plays every other seat too.

    With several seats it is self-play, told apart by what each is shown; the reward is that of ``seat``. Games draw
    from Python's own generator: moves are made one at a time in a process, each game with a generator of its own.
    """

    def __init__(self, game: str, *, seats: int = 1, seat: int = 0, settings: Mapping[str, Any] = EMPTY) -> None:
        if not 0 <= seat < seats:
            raise UsageError(f"The environment textarena has no seat {seat} of {seats}; they are counted from 0.")
        self._name = game
        self._seats = seats
        self._seat = seat
        self._settings = settings
        self._game: Any = None
        self._chance: Any = None
        self._rules: dict[int, str] = {}
        self._shown: dict[int, str] = {}

    async def open(self, prompt: Prompt) -> Opening:
        arena = package("textarena", environment="textarena", install="miles-rl[environments]")
        known = arena.envs.registration.ENV_REGISTRY
        if self._name not in known:
            close = get_close_matches(self._name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else "write one of textarena's ids, as in GuessTheNumber-v0."
            raise DataError(f"Prompt {prompt.id}: textarena has no game {self._name}; {hint}")

        def begin() -> Any:
            game = arena.make(self._name, **self._settings)
            game.reset(num_players=self._seats, seed=seed_of(prompt))
            return game

        self._chance = random.Random(seed_of(prompt)).getstate()
        self._game = await asyncio.to_thread(self._drawing, begin)
        rules = arena.ObservationType.PROMPT
        for player, told in self._game.state.observations.items():
            self._rules[player] = "".join(text for _, text, kind in told if kind is rules)
        return Opening(messages=(*prompt.messages, _user(await self._seen())), scores=True)

    async def step(self, reply: Message) -> Step:
        done, _ = await asyncio.to_thread(self._drawing, lambda: self._game.step(action=action_of(reply)))
        if not done:
            return Step(messages=[_user(await self._seen())])
        rewards, _ = await asyncio.to_thread(self._game.close)
        self._game = None
        if not rewards or self._seat not in rewards:
            raise EnvironmentFailed(f"{self._name} gave no reward to player {self._seat}")
        return Step(reward=float(rewards[self._seat]), done=True)

    async def close(self) -> None:
        if self._game is not None:
            await asyncio.to_thread(self._game.close)

    def _drawing(self, move: Callable[[], Any]) -> Any:
        """What ``move`` gives, with Python's generator where this game left it; it is put back for everyone else."""
        with _GENERATOR:
            before = random.getstate()
            random.setstate(self._chance)
            try:
                return move()
            finally:
                self._chance = random.getstate()
                random.setstate(before)

    async def _seen(self) -> str:
        player, seen = await asyncio.to_thread(self._game.get_observation)
        text = seen if isinstance(seen, str) else "\n".join(_words(seen))
        text, self._shown[player] = self._fresh(player, text), text
        return text if self._seats == 1 else f"[Player {player}]\n{text}"

    def _fresh(self, player: int, text: str) -> str:
        """What the conversation has not had yet: an observation may be all of the game, or its rules and a board.

        Where nothing is new, as after a move that a game refuses without a word, it is all of it once more.
        """
        before = self._shown.get(player)
        if before is None:
            return text.strip()
        if text.startswith(before):
            return text.removeprefix(before).strip() or text.strip()
        return text.removeprefix(self._rules.get(player, "")).strip()


def _words(seen: Sequence[Any]) -> list[str]:
    """Observations as they come unwrapped: (from whom, text, kind)."""
    return [str(entry[1]) if isinstance(entry, tuple) and len(entry) > 1 else str(entry) for entry in seen]


def _shown(seen: Any) -> str:
    return seen if isinstance(seen, str) else str(seen)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}
