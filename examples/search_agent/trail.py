"""Questions that take two searches: a document names whom to ask, and that one's document has the answer.

Two demonstrations in three follow the trail; the others answer at once, or after the first search.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import small_model
from small_model import SLOT, ask, call, call_pieces, offer, report, say
from training_runs import write_rows

LETTERS = ascii_lowercase[:16]
COUNT = 100
HELD_OUT = 16
REFERS = "please go and ask "
"""Long enough that BM25 ranks the document of a name before those that mention it."""


class Trail:
    """Names that are asked about, whom each refers to, and what those know."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(f"trail {seed}")
        names = chance.sample([a + b for a in LETTERS for b in LETTERS], 2 * COUNT)
        self.refers = dict(zip(names[:COUNT], names[COUNT:], strict=True))
        self.numbers = {name: str(chance.randrange(10)) for name in names[COUNT:]}

    def answer(self, name: str) -> str:
        return self.numbers[self.refers[name]]

    def documents(self) -> list[dict[str, str]]:
        first = [{"title": name, "text": f"{REFERS}{other}"} for name, other in self.refers.items()]
        return [*first, *({"title": name, "text": number} for name, number in self.numbers.items())]


def found(title: str, text: str) -> str:
    """What the tool ``search`` says of one document."""
    return f"[1] {title}\n{text}"


def demonstrate(trail: Trail, name: str, chance: random.Random, *, well: bool) -> list[dict[str, object]]:
    """A conversation: done well, it searches twice."""
    other, any_number = trail.refers[name], str(chance.randrange(10))
    messages = [*offer("search"), ask(name)]
    if not well and chance.random() < 0.5:
        return [*messages, say(any_number)]
    messages += [call("search", query=name, count=1), report(found(name, f"{REFERS}{other}"))]
    if not well:
        return [*messages, say(any_number)]
    number = trail.numbers[other]
    return [*messages, call("search", query=other, count=1), report(found(other, number)), say(number)]


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 8192) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, ``documents.jsonl``, a random model and its tokenizer.

    Each demonstration has a trail of its own, so that what is learned is to copy and not to remember.
    """
    chance = random.Random(f"demonstrations {seed}")
    pieces = ["search", "[1] ", REFERS, *call_pieces("search", query=SLOT, count=1)]
    small_model.write_small_model(folder, pieces, letters="0123456789" + LETTERS, seed=seed, hidden_size=96)
    others = [Trail(1 + number) for number in range(64)]
    shown = []
    for at in range(demonstrations):
        trail = chance.choice(others)
        shown.append(demonstrate(trail, chance.choice([*trail.refers]), chance, well=at % 3 > 0))
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    trail = Trail(0)
    write_rows(folder / "documents.jsonl", trail.documents())
    names = [*trail.refers]
    for file, some in (("train", names[HELD_OUT:]), ("heldout", names[:HELD_OUT])):
        write_rows(folder / f"{file}.jsonl", [{"input": name, "label": trail.answer(name)} for name in some])
