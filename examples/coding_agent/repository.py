"""A task in the style of SWE-bench: a repository with a bug, an issue, and hidden tests that run in the sandbox.

The bug is a wrong operator in a function whose docstring says what it should return. Half of the demonstrations read
the file and write the right operator; the others write any operator.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
import sandbox_task
import small_model
from small_model import SLOT, ask, call, call_pieces, offer, report, say
from training_runs import write_rows

OPERATORS = {"sum": "+", "difference": "-", "product": "*", "quotient": "//"}
"""What a docstring says, and the operator that does it."""
NAMES = ("combine", "merge", "join", "reduce", "apply", "total")
PATH = "src/numbers.py"
SOURCE = f'def {SLOT}(a, b):\n    """Return the {SLOT}."""\n    return a {SLOT} b\n'
ISSUE = " returns the wrong number"
DONE = "fixed"
TOOLS = ("read_file", "write_file", "list_files", "grep", "shell")
TESTS = """
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location("fixed", {path!r})
module = module_from_spec(spec)
spec.loader.exec_module(module)
for a, b in ((12, 4), (7, 3), (9, 2)):
    assert getattr(module, {name!r})(a, b) == a {operator} b, (a, b)
"""


class Repository(sandbox_task.SandboxTask):
    """An environment with tools for files and a shell on a checkout of its own."""

    tools = ("files", "shell")


def source(name: str, kind: str, operator: str) -> str:
    """The file with the function."""
    before, *parts = SOURCE.split(SLOT)
    return before + "".join(word + part for word, part in zip((name, kind, operator), parts, strict=True))


def demonstrate(name: str, kind: str, wrong: str, chance: random.Random, *, well: bool) -> list[dict[str, object]]:
    """A conversation: done well, it reads the docstring and writes what it asks for."""
    messages = [*offer(*TOOLS), ask(f"{name}{ISSUE}"), call("read_file", path=PATH)]
    messages.append(report(source(name, kind, wrong)))
    written = source(name, kind, OPERATORS[kind] if well else chance.choice([*OPERATORS.values()]))
    saved = f"Wrote {len(written.encode())} bytes to {PATH}."
    return [*messages, call("write_file", path=PATH, content=written), report(saved), say(DONE)]


def row(name: str, kind: str, wrong: str) -> dict[str, object]:
    """A prompt as data has it: the issue, the repository's files, and the hidden tests."""
    tests = TESTS.format(path=PATH, name=name, operator=OPERATORS[kind])
    files = {PATH: source(name, kind, wrong), "README.md": "Functions of two numbers.\n"}
    return {"input": f"{name}{ISSUE}", "label": "", "metadata": {"files": files, "check": tests}}


def pieces() -> list[str]:
    """What is a token: the parts of the file, of the calls and of their results."""
    calls = [*call_pieces("read_file", path=PATH), *call_pieces("write_file", path=PATH, content=SOURCE)]
    saved = ("Wrote ", f" bytes to {PATH}.")
    return [*TOOLS, *NAMES, *OPERATORS, *OPERATORS.values(), ISSUE, DONE, *SOURCE.split(SLOT), *calls, *saved]


def write_start(folder: Path, *, seed: int = 0, demonstrations: int = 4096) -> None:
    """``warmup.jsonl``, ``train.jsonl``, ``heldout.jsonl``, a random model and its tokenizer."""
    chance = random.Random(f"repository {seed}")
    small_model.write_small_model(folder, pieces(), letters="0123456789", seed=seed, hidden_size=96, max_positions=256)
    bugs = [
        (name, kind, wrong)
        for name in NAMES
        for kind, right in OPERATORS.items()
        for wrong in OPERATORS.values()
        if wrong != right
    ]
    chance.shuffle(bugs)
    shown = [demonstrate(*chance.choice(bugs), chance, well=at % 2 == 0) for at in range(demonstrations)]
    write_rows(folder / "warmup.jsonl", [{"messages": messages} for messages in shown])
    write_rows(folder / "train.jsonl", [row(*bug) for bug in bugs[12:]])
    write_rows(folder / "heldout.jsonl", [row(*bug) for bug in bugs[:12]])
