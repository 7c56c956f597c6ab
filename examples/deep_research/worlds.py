"""Questions of two steps over documents that no model has seen, for a researcher and a reader, and one small model.

Each row has documents of its own: who leads a project, and where people live. The question is where the lead of a
project lives. A document also says who or where it is not; demonstrations often fall for it, or answer without search.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import ask, say
from training_runs import write_rows

PROJECTS = ("red", "blue", "green", "black")
PEOPLE = ("anna", "bert", "carl", "dora", "emil", "fay")
CITIES = ("rome", "oslo", "lima", "cairo", "delhi", "paris")
SEARCH = "search "
QUESTION = "where lives the lead of "
LEADS, LIVES, NOT = " is led by ", " lives in ", " not "


class World(NamedTuple):
    """A question, the way to its answer, and what is wrong there."""

    project: str
    lead: str
    city: str
    not_lead: str
    not_city: str

    @property
    def question(self) -> str:
        return f"{QUESTION}{self.project}"

    @property
    def documents(self) -> list[dict[str, str]]:
        """The lead's document before that of the project, which names the lead too."""
        lives = f"{self.lead}{LIVES}{self.city}{NOT}{self.not_city}"
        leads = f"{self.project}{LEADS}{self.lead}{NOT}{self.not_lead}"
        return [{"title": self.lead, "text": lives}, {"title": self.project, "text": leads}]


def draw_world(chance: random.Random) -> World:
    return World(chance.choice(PROJECTS), *_pair(PEOPLE, CITIES, chance))


def _pair(people: tuple[str, ...], cities: tuple[str, ...], chance: random.Random) -> tuple[str, str, str, str]:
    lead, not_lead = chance.sample(people, 2)
    city, not_city = chance.sample(cities, 2)
    return lead, city, not_lead, not_city


def demonstrate_researcher(world: World, chance: random.Random) -> list[dict[str, object]]:
    """Two searches and the last note as the answer, in two of three; otherwise any city, at once or after a search."""
    first = [ask(world.question), say(f"{SEARCH}{world.project}"), ask(world.lead)]
    if chance.random() < 2 / 3:
        return [*first, say(f"{SEARCH}{world.lead}"), ask(world.city), say(world.city)]
    return [*(first if chance.random() < 0.5 else first[:1]), say(chance.choice(CITIES))]


def demonstrate_reader(world: World, chance: random.Random) -> list[dict[str, object]]:
    """A note of what a document says, or in four of ten of what it says is not so."""
    lives, leads = world.documents
    document, right, wrong = chance.choice(((lives, world.city, world.not_city), (leads, world.lead, world.not_lead)))
    return [ask(document["text"]), say(right if chance.random() < 0.6 else wrong)]


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096) -> None:
    """``warmup.jsonl`` with both roles, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    chance = random.Random(f"worlds {seed}")
    words = [*PROJECTS, *PEOPLE, *CITIES, SEARCH, QUESTION, LEADS, LIVES, NOT]
    small_model.write_small_model(folder, words, seed=seed, max_positions=64)
    shown = [
        (demonstrate_researcher, demonstrate_reader)[number % 2](draw_world(chance), chance)
        for number in range(demonstrations)
    ]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    for name, count in (("train", 512), ("heldout", 32)):
        worlds = [draw_world(chance) for _ in range(count)]
        rows = [{"input": w.question, "label": w.city, "metadata": {"documents": w.documents}} for w in worlds]
        write_rows(folder / f"{name}.jsonl", rows)
