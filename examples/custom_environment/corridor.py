"""An environment of one's own: a corridor of five places with a key and a door, in which the policy walks.

The key is fetched first, then the door is opened. Both are rewarded when they happen, and are parts of the reward in
the logs. Demonstrations walk the right way six times in ten.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from miles.core.types import Prompt
from miles.rollout.tools.environment import OpenResult, StepResult
from miles.rollout.tools.tool import Message

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import ask, say
from training_runs import write_rows

PLACES = 5
MOST_MOVES = 8
MOVES = {"left": -1, "right": 1}
KEY_REWARD, DOOR_REWARD = 0.4, 0.6


class Corridor:
    """An environment (see docs/tools.md): 0.4 for the key, and 0.6 for the door, less if it took detours."""

    def __init__(self, most_moves: int = MOST_MOVES) -> None:
        self._left, self._moves = most_moves, 0
        self._at, self._key, self._door, self._best = 0, 0, 0, 0

    async def open(self, prompt: Prompt) -> OpenResult:
        self._at, self._key, self._door = prompt.metadata["places"]
        self._best = abs(self._at - self._key) + abs(self._key - self._door)
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        move = MOVES.get(str(reply["content"]).strip())
        if move is None:  # it is no move, and the trajectory ends with what it has earned
            return StepResult(reward=0.0, done=True)
        self._at = min(max(self._at + move, 0), PLACES - 1)
        self._left, self._moves = self._left - 1, self._moves + 1
        if self._key < 0 and self._at == self._door:
            earned = DOOR_REWARD * self._best / self._moves
            return StepResult(reward=earned, parts={"door": 1.0}, done=True)
        seen: Message = {"role": "user", "content": ""}
        if self._at == self._key:
            self._key = -1
            seen["content"] = show(self._at, self._key, self._door)
            return StepResult(messages=[seen], reward=KEY_REWARD, parts={"key": 1.0}, done=not self._left)
        seen["content"] = show(self._at, self._key, self._door)
        return StepResult(messages=[seen], done=not self._left)

    async def close(self) -> None:
        return


def show(at: int, key: int, door: int) -> str:
    """What is seen: on which side the key lies, if it still does, and on which the door is."""
    return f"key {side(at, key)} door {side(at, door)}" if key >= 0 else f"door {side(at, door)}"


def side(at: int, place: int) -> str:
    return "right" if place > at else "left" if place < at else "here"


def demonstrate(at: int, key: int, door: int, chance: random.Random, *, good: float = 0.6) -> list[dict[str, object]]:
    """A walk, of which a share of ``good`` goes the right way."""
    messages: list[dict[str, object]] = []
    for _ in range(MOST_MOVES):
        right = side(at, door if key < 0 else key)
        wrong = "left" if right == "right" else "right"
        move = right if chance.random() < good else wrong
        messages += [ask(show(at, key, door)), say(move)]
        at = min(max(at + MOVES[move], 0), PLACES - 1)
        if key < 0 and at == door:
            break
        key = -1 if at == key else key
    return messages


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 2048) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    chance = random.Random(f"corridor {seed}")
    small_model.write_small_model(folder, ["key ", " door ", "door ", "here", *MOVES], seed=seed, max_positions=192)
    places = [(a, b, c) for a in range(PLACES) for b in range(PLACES) for c in range(PLACES) if len({a, b, c}) == 3]
    chance.shuffle(places)
    shown = [demonstrate(*chance.choice(places), chance) for _ in range(demonstrations)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, some in (("train", places[12:]), ("heldout", places[:12])):
        rows = [{"input": show(*each), "label": "", "metadata": {"places": each}} for each in some]
        write_rows(folder / f"{name}.jsonl", rows)
