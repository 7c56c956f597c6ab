"""The house rules, as tests: floors, torch-free rooms, sizes, names, frozen nouns, and the list of knobs."""

import ast
import dataclasses
import os
import pkgutil
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import miles
from miles.config.help import shown, spelled
from miles.config.table import Knob, knobs_of
from miles.core import events, types
from miles.launch.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "miles"
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
KNOBS = ROOT / "tests" / "knobs.txt"
NAMES = ROOT / "tests" / "exported.txt"
HEAVY = ("torch", "numpy", "transformers", "rich", "yaml", "pyarrow", "matplotlib", "safetensors")
TORCH_FREE = (
    *("core", "config", "rollout", "schedule", "plug"),
    *("models.spec", "models.families", "models.footprint", "models.files", "models.names", "algo.credit"),
    *("models.reader", "models.sources", "cluster.route"),
    *("launch.main", "launch.config", "launch.rules", "launch.plan", "launch.doctor", "launch.show"),
)
ROOTS = tuple(dict.fromkeys(command.root for command in COMMANDS.values() if command.root is not None))
LINES = ("--help", "train --help", "route --help", "--version", "train --bananas 3", "demo --steps x", "zzz")


def named(file: Path) -> str:
    return str(file.relative_to(ROOT))


def everything() -> list[Path]:
    """The files of the project, and none that a run or a build has made."""
    ours = [top for top in ROOT.iterdir() if not top.name.startswith(".") and top.name not in ("runs", "build", "dist")]
    return [f for top in ours for f in ([top] if top.is_file() else top.rglob("*"))]


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))


# -- floors ---------------------------------------------------------------------------------


def test_imports_go_down_only():
    program = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("room", TORCH_FREE)
def test_a_torch_free_room_is_free_of_torch(room: str):
    code = (
        "import importlib, pkgutil, sys\n"
        f"room = importlib.import_module('miles.{room}')\n"
        "for found in pkgutil.walk_packages(getattr(room, '__path__', ()), room.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "sys.exit(str({'torch', 'transformers', 'ray', 'sglang'} & set(sys.modules) or ''))"
    )
    assert run_python(code).stderr.strip() == ""


def test_transformers_is_imported_where_it_is_needed_and_not_at_the_head_of_a_file():
    def heads(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    # It takes longer than torch, and most ranks and engines never ask for it.
    assert not [named(f) for f, tree in TREES.items() if any(n.split(".")[0] == "transformers" for n in heads(tree))]


@pytest.mark.parametrize("line", LINES)
def test_help_and_complaints_load_nothing_heavy(line: str):
    code = (
        f"import sys; from miles.launch.main import main; main({line.split()!r})\n"
        f"found = set({HEAVY!r}) & set(sys.modules)\n"
        "sys.exit(f'loaded {found}' if found else 0)"
    )
    assert run_python(code).returncode == 0


def test_help_takes_no_more_than_a_few_bare_starts_of_python():
    def seconds(*arguments: str) -> float:
        started = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
        return time.perf_counter() - started

    # In turns, so that whatever else the machine does slows both alike.
    pairs = [
        (seconds("-c", "import dataclasses"), seconds("-m", "miles.launch.main", "train", "--help")) for _ in range(5)
    ]
    assert statistics.median(helped / bare for bare, helped in pairs) < 8


# -- sizes and names ------------------------------------------------------------------------


def test_no_file_is_long():
    python = [f for f in everything() if f.suffix == ".py"]
    assert not {named(f): n for f in python if (n := len(f.read_text(encoding="utf-8").splitlines())) > 400}


def test_no_function_is_long():
    long = {
        f"{named(file)}:{node.name}": length
        for file, tree in TREES.items()
        for node in functions(tree)
        if (length := (node.end_lineno or node.lineno) - node.lineno + 1) > 60
    }
    assert not long


def test_every_module_opens_with_a_sentence():
    def opening(tree: ast.Module) -> str:
        return (ast.get_docstring(tree) or "").split("\n\n")[0]

    assert not [named(f) for f, tree in TREES.items() if len(opening(tree)) < 15 or opening(tree)[-1] not in ".:?!"]


def test_a_package_file_holds_only_its_card():
    def is_card(tree: ast.Module) -> bool:
        return all(
            isinstance(node, ast.Expr | ast.ImportFrom) or (isinstance(node, ast.Assign) and _is_dunder(node))
            for node in tree.body
        )

    assert not [named(f) for f, tree in TREES.items() if f.name == "__init__.py" and not is_card(tree)]


def _is_dunder(node: ast.Assign) -> bool:
    return all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)


def test_no_name_says_nothing():
    empty = ("util", "helper", "manager", "misc", "common", "stuff")
    assert not [named(f) for f in SOURCE.rglob("*") if any(word in f.stem.lower() for word in empty)]


def test_no_file_knows_this_machine():
    here = str(ROOT)
    written = [f for f in everything() if f.suffix in (".py", ".toml", ".md", ".yaml", ".txt", ".tsv")]
    assert not [named(f) for f in written if here != "/" and f"{here}/" in f.read_text(encoding="utf-8")]


def test_nothing_is_caught_that_is_not_named():
    bare = [
        f"{named(file)}:{node.lineno}"
        for file, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not bare


# -- nouns, knobs, exports ------------------------------------------------------------------


@pytest.mark.parametrize("room", [types, events], ids=["types", "events"])
def test_nouns_are_frozen_and_slotted(room: ModuleType):
    nouns = [
        noun for noun in vars(room).values() if dataclasses.is_dataclass(noun) and noun.__module__ == room.__name__
    ]
    assert nouns
    for noun in nouns:
        assert noun.__dataclass_params__.frozen, noun  # pyright: ignore
        assert "__slots__" in vars(noun), noun


def knobs() -> list[Knob]:
    """Of every command; a room that several commands have is there once."""
    found = (knob for root in ROOTS for knob in knobs_of(root).values())
    return list({(knob.room, knob.name): knob for knob in found}.values())


@pytest.mark.parametrize("knob", knobs(), ids=lambda knob: f"{knob.room}.{knob.name}")
def test_every_knob_is_told_in_a_sentence(knob: Knob):
    assert knob.help[:1].isupper() or knob.help[:1] == "|", knob.help
    assert knob.help.endswith(".") and "\n" not in knob.help
    assert 12 < len(knob.help) < 200
    assert not knob.kind.optional or knob.default is None, "an absent value is the default of what may be absent"


def test_every_room_of_the_config_is_frozen():
    for root in ROOTS:
        for cls in (root, *(f.type for f in dataclasses.fields(root))):
            assert cls.__dataclass_params__.frozen and "__slots__" in vars(cls)  # pyright: ignore


def test_the_generated_list_of_knobs_is_up_to_date(regenerate: bool):
    """Adding a flag is a decision: run pytest with --regenerate to take it, and review the difference."""
    lines = [f"{knob.room}\t{spelled(knob)}\t{shown(knob.default)}" for knob in knobs()]
    compare(KNOBS, lines, regenerate)


def test_the_generated_list_of_exported_names_is_up_to_date(regenerate: bool):
    """What the ground floor, the plugs and the front door offer to others."""
    rooms = ("core.types", "core.protocols", "core.errors", "core.events", "plug.load", "plug.points", "launch.config")
    lines = [f"miles.{room}\t{name}" for room in rooms for name in exported(room)]
    compare(NAMES, lines, regenerate)


def exported(module: str) -> Iterator[str]:
    """Public names made in a module, in its order."""
    for node in TREES[SOURCE / f"{module.replace('.', '/')}.py"].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def compare(file: Path, lines: list[str], regenerate: bool) -> None:
    text = "\n".join(lines) + "\n"
    if regenerate:
        file.write_text(text, encoding="utf-8")
    known = file.read_text(encoding="utf-8").splitlines()
    assert lines == known, (
        f"{named(file)} is out of date; if this was meant, run: pytest {named(Path(__file__))} --regenerate"
    )


def test_the_package_declares_what_it_ships():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(project["tool"]["setuptools"]["package-data"]["miles"])
    assert shipped == {
        str(f.relative_to(SOURCE)) for f in SOURCE.rglob("*") if f.is_file() and f.suffix not in (".py", ".pyc")
    }
    assert project["project"]["scripts"] == {"miles": "miles.launch.main:main"}


def test_every_module_can_be_imported_by_its_name():
    names = {info.name for info in pkgutil.walk_packages(miles.__path__, "miles.")}
    files = {f.relative_to(SOURCE).with_suffix("") for f in FILES if f.name != "__init__.py"}
    assert {".".join(("miles", *file.parts)) for file in files} <= names


def test_the_commands_are_these():
    assert list(COMMANDS) == [
        "train",
        "plan",
        "demo",
        "doctor",
        "eval",
        "chat",
        "show",
        "engines",
        "replay",
        "serve",
        "parity",
        "route",
    ]
