"""The game of Nim with one pile: take one to three stones in turn; whoever takes the last one wins.

The environment plays the other side, as well as a row's ``skill`` says: with 1 it never makes a mistake. Demonstrations
keep to the rules and are seldom good.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from pathlib import Path

from miles.core.types import Prompt
from miles.rollout.tools.environment import OpenResult, StepResult
from miles.rollout.tools.tool import Message

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import ask, say
from training_runs import write_rows

MOST = 3
"""Stones that may be taken at once."""
PILES = range(1, 13)
SHOWN_SKILL = 0.2
"""Of the player in demonstrations: a model that has only seen random moves takes all large piles for the same."""


class Nim:
    """An environment (see docs/tools.md): a game won is worth 1, one lost or a move against the rules 0."""

    def __init__(self) -> None:
        self._pile, self._skill = 0, 0.0
        self._chance = random.Random()

    async def open(self, prompt: Prompt) -> OpenResult:
        self._pile, self._skill = prompt.metadata["pile"], prompt.metadata["skill"]
        self._chance = random.Random(f"{prompt.id} {prompt.epoch}")  # one opponent for all trajectories of a prompt
        return OpenResult(messages=prompt.messages, provides_reward=True)

    async def step(self, reply: Message) -> StepResult:
        said = str(reply["content"]).strip()
        if not said.isdigit() or not 1 <= int(said) <= min(MOST, self._pile):
            return StepResult(reward=0.0, done=True)
        self._pile -= int(said)
        if not self._pile:
            return StepResult(reward=1.0, done=True)
        self._pile -= answer(self._pile, self._skill, self._chance)
        if not self._pile:
            return StepResult(reward=0.0, done=True)
        return StepResult(messages=[{"role": "user", "content": show(self._pile)}])

    async def close(self) -> None:
        return


def answer(pile: int, skill: float, chance: random.Random) -> int:
    """The other side's move: with the chance of ``skill`` the best, which leaves a multiple of four."""
    best = pile % (MOST + 1)
    return best if best and chance.random() < skill else chance.randint(1, min(MOST, pile))


def show(pile: int) -> str:
    return f"{pile} left"


def demonstrate(pile: int, chance: random.Random) -> list[dict[str, object]]:
    """A game of one who makes the best move now and then against one who moves at random."""
    messages: list[dict[str, object]] = []
    while pile > 0:
        taken = answer(pile, SHOWN_SKILL, chance)
        messages += [ask(show(pile)), say(str(taken))]
        pile -= taken
        if pile:
            pile -= chance.randint(1, min(MOST, pile))
    return messages


def row(pile: int, skill: float) -> dict[str, object]:
    """A prompt as data has it."""
    return {"input": show(pile), "label": "", "metadata": {"pile": pile, "skill": skill}}


def write_start(
    folder: Path,
    *,
    skill: float = 0.3,
    parts: dict[str, Iterable[int]] | None = None,
    seed: int = 0,
    demonstrations: int = 4096,
) -> None:
    """``warmup.jsonl``, a file of prompts for each of ``parts``, ``heldout.jsonl`` with all of them, and a model."""
    chance = random.Random(f"nim {seed}")
    small_model.write_small_model(folder, [show(pile) for pile in PILES], letters="0123456789", seed=seed)
    shown = [demonstrate(chance.choice(PILES), chance) for _ in range(demonstrations)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    parts = parts or {"train": PILES}
    for name, piles in parts.items():
        write_rows(folder / f"{name}.jsonl", [row(pile, skill) for pile in piles for _ in range(16)])
    every = [pile for piles in parts.values() for pile in piles]
    write_rows(folder / "heldout.jsonl", [row(pile, skill) for pile in every for _ in range(4)])
