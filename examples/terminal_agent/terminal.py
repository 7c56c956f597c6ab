"""Work in a terminal: a file of unknown name is to be renamed, and what counts is the folder that is left.

Two demonstrations in three look first and then rename; the others rename a file without looking, or only say so.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from string import ascii_lowercase

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import sandbox_task
import small_model
from small_model import SLOT, ask, call, call_pieces, offer, report, say
from training_runs import write_rows

TASK = "rename the file to done"
LETTERS = ascii_lowercase[:12]
NAMES = [a + b for a in LETTERS for b in LETTERS]
OK, SILENCE = "ok", "[no output]"
CHECK = "import os\nassert 'done' in os.listdir() and open('done').read() == {content!r}"


class Terminal(sandbox_task.SandboxTask):
    """An environment with the tool ``shell`` on a folder of its own."""

    tools = ("shell",)


def demonstrate(name: str, chance: random.Random, *, well: bool) -> list[dict[str, object]]:
    """A conversation: done well, it looks for the file's name."""
    messages = [*offer("shell"), ask(TASK)]
    if not well and chance.random() < 0.5:
        return [*messages, say(OK)]
    if well:
        messages += [call("shell", command="ls"), report(name)]
    named = name if well else chance.choice(NAMES)
    result = SILENCE if well else f"mv: cannot stat '{named}': No such file or directory\n[exit status 1]"
    return [*messages, call("shell", command=f"mv {named} done"), report(result), say(OK)]


def row(name: str) -> dict[str, object]:
    """A prompt as data has it: the folder's files, and the program that checks them."""
    metadata = {"files": {name: name}, "check": CHECK.format(content=name)}
    return {"input": TASK, "label": "", "metadata": metadata}


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    chance = random.Random(f"terminal {seed}")
    failure = ("mv: cannot stat '", "': No such file or directory\n[exit status 1]")
    calls = [*call_pieces("shell", command="ls"), *call_pieces("shell", command=f"mv {SLOT} done")]
    pieces = ["shell", TASK, OK, SILENCE, *failure, *calls]
    small_model.write_small_model(folder, pieces, letters=LETTERS, seed=seed, hidden_size=96)
    names = chance.sample(NAMES, len(NAMES))
    shown = [demonstrate(chance.choice(names[16:]), chance, well=at % 3 > 0) for at in range(demonstrations)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    write_rows(folder / "train.jsonl", [row(name) for name in names[16:]])
    write_rows(folder / "heldout.jsonl", [row(name) for name in names[:16]])
