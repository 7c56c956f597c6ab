"""Architecture rules as tests: layers, torch-free packages, names, module size, import cycles, reviewed lists."""

import ast
import dataclasses
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import miles
from miles.config.help import format_flag
from miles.config.schema import Option, get_options
from miles.config.value_types import format_value
from miles.core import events, types
from miles.launch.main import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "miles"
FILES = sorted(SOURCE.rglob("*.py"))
OPTIONS = ROOT / "tests" / "options.txt"
EXPORTED = ROOT / "tests" / "exported.txt"
VOCABULARY = ROOT / "tests" / "vocabulary.txt"
BLOCKS = ("body", "orelse", "handlers", "finalbody", "cases")
HEAVY = (
    *("torch", "numpy", "transformers", "rich", "yaml", "pyarrow", "matplotlib", "safetensors", "pydantic"),
    *("PIL", "http.client", "urllib.request"),
)
TORCH_FREE = (
    "core",
    "config",
    "rollout",
    "schedule",
    "hooks",
    "algo.advantages",
    "cluster.router",
    "models.spec",
    "models.families",
    "models.accounting.params",
    "models.checkpoint.param_map",
    "models.checkpoint.reader",
    "models.checkpoint.safetensors_io",
    "models.checkpoint.tensor_sources",
    "launch.main",
    "launch.config",
    "launch.rules",
    "launch.plan",
    "launch.commands.doctor",
)
COMMAND_ROOTS = tuple(dict.fromkeys(command.root for command in COMMANDS.values() if command.root is not None))
LIGHT_COMMANDS = (
    "--help",
    "train --help",
    "route --help",
    "--version",
    "train --bananas 3",
    "demo --steps x",
    "zzz",
)

# Words that are metaphors here; the field has another word for each of these things.
METAPHORS = frozenset(
    [
        "aloud",
        "alone",
        "ask",
        "card",
        "cast",
        "company",
        "crew",
        "dealt",
        "desk",
        "door",
        "drawing",
        "drawn",
        "errand",
        "evidence",
        "fleet",
        "floor",
        "foreign",
        "hall",
        "hearing",
        "home",
        "house",
        "keeper",
        "knob",
        "ladder",
        "landing",
        "lane",
        "lesson",
        "lone",
        "manner",
        "mend",
        "mending",
        "noun",
        "order",
        "parcel",
        "patience",
        "people",
        "plug",
        "portion",
        "room",
        "rung",
        "seat",
        "shelf",
        "speech",
        "spelling",
        "syllabus",
        "tempo",
        "telling",
        "told",
        "trunk",
        "warden",
        "wish",
        "worth",
    ]
)
IRREGULAR_PARTICIPLES = frozenset(
    [
        "begun",
        "bound",
        "bought",
        "broken",
        "brought",
        "built",
        "caught",
        "chosen",
        "dealt",
        "done",
        "drawn",
        "felt",
        "found",
        "given",
        "gone",
        "grown",
        "heard",
        "held",
        "kept",
        "known",
        "laid",
        "led",
        "left",
        "lent",
        "lost",
        "made",
        "meant",
        "met",
        "paid",
        "said",
        "seen",
        "sent",
        "shown",
        "sought",
        "spent",
        "spoken",
        "taken",
        "taught",
        "thought",
        "thrown",
        "told",
        "woken",
        "worn",
        "written",
    ]
)
NOT_PARTICIPLES = frozenset({"embed", "exceed", "feed", "need", "proceed", "seed", "speed"})
SINGLE_IMPORTER_LIMIT = 26
# Modules at upstream's import paths, for hooks written for it: their names are upstream's, and each is a few lines.
UPSTREAM_MODULES = (
    "backends/megatron_utils",
    "backends/training_utils",
    "rollout/base_types",
    "rollout/data_source",
    "rollout/filter_hub",
    "rollout/fully_async_data_buffer",
    "rollout/generate_hub",
    "rollout/generate_utils",
    "rollout/on_policy_distillation",
    "rollout/rm_hub",
    "rollout/sglang_rollout",
    "utils",
)


def is_upstream_module(file: Path) -> bool:
    name = file.relative_to(SOURCE).with_suffix("").as_posix()
    return any(name == path or name.startswith(f"{path}/") for path in UPSTREAM_MODULES)


@cache
def parse_all() -> dict[Path, ast.Module]:
    """The syntax tree of every module, made when a test wants it: every worker imports this file."""
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in FILES}


def relative(file: Path) -> str:
    return str(file.relative_to(ROOT))


def project_files() -> list[Path]:
    """Every file of the project, without what a run or a build has made."""
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".") and top.name not in ("runs", "build", "dist")]
    return [file for top in tops for file in ([top] if top.is_file() else top.rglob("*"))]


def walk_functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def public_classes() -> Iterator[tuple[Path, str]]:
    for file, tree in parse_all().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield file, node.name


def split_words(name: str) -> list[str]:
    """The words of a snake_case or CamelCase name, in lower case; digits belong to the word before them."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+", name)]


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))


# -- layers and imports ---------------------------------------------------------------------


def test_imports_go_down_the_layers():
    program = Path(sys.executable).with_name("lint-imports")
    run = subprocess.run([program], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_torch_free_packages_import_without_torch():
    code = (
        "import importlib, pkgutil, sys\n"
        "heavy = {'torch', 'transformers', 'ray', 'sglang'}\n"
        f"for name in {TORCH_FREE!r}:\n"
        "    package = importlib.import_module(f'miles.{name}')\n"
        "    for found in pkgutil.walk_packages(getattr(package, '__path__', ()), package.__name__ + '.'):\n"
        "        importlib.import_module(found.name)\n"
        "        if heavy & set(sys.modules): sys.exit(f'{found.name} loads {heavy & set(sys.modules)}')\n"
        "    if heavy & set(sys.modules): sys.exit(f'{name} loads {heavy & set(sys.modules)}')\n"
    )
    assert run_python(code).stderr.strip() == ""


def test_transformers_is_imported_lazily():
    def top_level_imports(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield node.module or ""

    # Its import takes longer than torch's, and most ranks and engines never need it.
    eager = [
        f for f, tree in parse_all().items() if any(n.split(".")[0] == "transformers" for n in top_level_imports(tree))
    ]
    assert not [relative(file) for file in eager]


def test_help_and_usage_errors_import_nothing_heavy():
    code = (
        "import contextlib, io, sys\n"
        "from miles.launch.main import main\n"
        f"for line in {LIGHT_COMMANDS!r}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        main(line.split())\n"
        f"    found = set({HEAVY!r}) & set(sys.modules)\n"
        "    if found: sys.exit(f'{line!r} loads {found}')\n"
    )
    run = run_python(code)
    assert run.returncode == 0, run.stderr


def walk_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements, those of functions and classes included, and none that is for types alone."""
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for name in BLOCKS[1:] if is_for_types else BLOCKS:
            nodes.extend(getattr(node, name, ()))


@cache
def import_graph() -> dict[str, set[str]]:
    """Module to the modules of ours it imports, function-local imports included; imports for types alone are not."""
    modules = {_module_name(file): file for file in FILES}
    graph: dict[str, set[str]] = {}
    for name, file in modules.items():
        found: set[str] = set()
        for node in walk_statements(parse_all()[file]):
            if isinstance(node, ast.ImportFrom) and node.module:
                qualified = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {q if q in modules else node.module for q in qualified}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
        graph[name] = {module for module in found if module in modules and module != name}
    return graph


@pytest.fixture(scope="module", autouse=True)
def graph_of_imports() -> None:
    """Read all imports before any test, which would else need the time of the others too."""
    import_graph()


def _module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_modules_import_each_other_in_no_cycle():
    graph = {name: set(targets) for name, targets in import_graph().items()}
    while leaves := [name for name, targets in graph.items() if not targets & graph.keys()]:
        for name in leaves:
            del graph[name]
    importers = {target for targets in graph.values() for target in targets}
    assert not sorted(graph.keys() & importers), "these modules are on an import cycle, or import one"


# -- names ----------------------------------------------------------------------------------


def test_public_class_names_are_unique():
    found: defaultdict[str, list[str]] = defaultdict(list)
    for file, name in public_classes():
        found[name].append(relative(file))
    assert not {name: files for name, files in found.items() if len(files) > 1}


def test_no_function_is_named_by_a_participle_alone():
    def is_participle(name: str) -> bool:
        word = name.strip("_")
        if "_" in word or word in NOT_PARTICIPLES:
            return False
        return word in IRREGULAR_PARTICIPLES or (word.endswith("ed") and len(word) > 4)

    assert not [
        f"{relative(file)}:{node.lineno} {node.name}"
        for file, tree in parse_all().items()
        for node in walk_functions(tree)
        if is_participle(node.name)
    ]


def test_modules_and_public_classes_use_no_metaphor():
    stems = [(file, file.stem) for file in FILES if file.name != "__init__.py"]
    packages = [(file, file.parent.name) for file in FILES if file.name == "__init__.py"]
    assert not [
        f"{relative(file)}: {name}"
        for file, name in (*stems, *packages, *public_classes())
        if METAPHORS & set(split_words(name))
    ]


def test_the_generated_vocabulary_of_modules_and_classes_is_reviewed(regenerate: bool):
    """Every word in a module's or public class's name is on a reviewed list: run with --regenerate, review the diff."""
    own = [file for file in FILES if not is_upstream_module(file)]
    names = [part for file in own for part in file.relative_to(SOURCE).with_suffix("").parts if part != "__init__"]
    classes = [name for file, name in public_classes() if not is_upstream_module(file)]
    words = {word for name in (*names, *classes) for word in split_words(name)}
    compare(VOCABULARY, sorted(words), regenerate)


def test_every_module_opens_with_a_sentence():
    def opening(tree: ast.Module) -> str:
        return (ast.get_docstring(tree) or "").split("\n\n")[0]

    assert not [
        relative(f) for f, tree in parse_all().items() if len(opening(tree)) < 15 or opening(tree)[-1] not in ".:?!"
    ]


def test_package_init_files_hold_only_a_docstring_and_exports():
    def is_plain(tree: ast.Module) -> bool:
        return all(
            isinstance(node, ast.Expr | ast.ImportFrom) or (isinstance(node, ast.Assign) and _is_dunder(node))
            for node in tree.body
        )

    assert not [relative(f) for f, tree in parse_all().items() if f.name == "__init__.py" and not is_plain(tree)]


def _is_dunder(node: ast.Assign) -> bool:
    return all(isinstance(target, ast.Name) and target.id.startswith("__") for target in node.targets)


def test_examples_in_docstrings_are_right():
    """Those of modules that are imported quickly: without torch, sympy or a language detector."""
    packages = ("algo.advantages", "cluster.process", "config", "core", "hooks", "launch.plan", "observe.formatting")
    packages += ("rollout", "schedule")
    written = [_module_name(file) for file in FILES if ">>> " in file.read_text(encoding="utf-8")]
    names = [name for name in written if name.startswith(tuple(f"miles.{package}" for package in packages))]
    names = sorted({*names} - {"miles.rollout.reward.symbolic", "miles.rollout.reward.ifeval.linguistic"})
    assert not {name: failed for name in names if (failed := doctest.testmod(importlib.import_module(name)).failed)}


# -- size and layout ------------------------------------------------------------------------


def test_files_have_at_most_700_lines():
    python = [file for file in project_files() if file.suffix == ".py"]
    lengths = {relative(file): len(file.read_text(encoding="utf-8").splitlines()) for file in python}
    assert not {name: length for name, length in lengths.items() if length > 700}


def test_functions_have_at_most_60_lines():
    def first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
        """Of a Triton kernel only the body counts: each pointer and each constant is an argument of its own."""
        is_kernel = any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        return node.body[0].lineno if is_kernel else node.lineno

    assert not {
        f"{relative(file)}:{node.name}": length
        for file, tree in parse_all().items()
        for node in walk_functions(tree)
        if (length := (node.end_lineno or node.lineno) - first_line(node) + 1) > 60
    }


def test_few_small_modules_have_a_single_importer():
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for name, targets in import_graph().items():
        for target in targets:
            importers[target].add(name)
    small = [
        relative(file)
        for file in FILES
        if file.name != "__init__.py"
        and not is_upstream_module(file)
        and file.parent.name != "families"  # imported by their registry alone
        and len(importers[_module_name(file)]) == 1
        and len(file.read_text(encoding="utf-8").splitlines()) < 70
    ]
    assert len(small) <= SINGLE_IMPORTER_LIMIT, small


def test_no_file_names_a_path_of_this_machine():
    here = str(ROOT)
    written = [f for f in project_files() if f.suffix in (".py", ".toml", ".md", ".yaml", ".txt", ".tsv")]
    assert not [relative(f) for f in written if here != "/" and f"{here}/" in f.read_text(encoding="utf-8")]


def test_every_except_clause_names_what_it_catches():
    assert not [
        f"{relative(file)}:{node.lineno}"
        for file, tree in parse_all().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]


def test_no_literal_tuple_or_list_is_unpacked_into_another():
    assert not [
        f"{relative(file)}:{node.lineno}"
        for file, tree in parse_all().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    ]


def test_one_line_assigns_no_three_unrelated_values():
    """Values of the same form are related: fields of one object, or the results of one function."""

    def form(value: ast.expr) -> str:
        match value:
            case ast.Attribute(value=of):
                return f"field of {ast.unparse(of)}"
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
                return f"result of {name}"
            case ast.Subscript():
                return "element"
            case _:
                return f"value {id(value)}"

    def has_unrelated_values(node: ast.AST) -> bool:
        match node:
            case ast.Assign(targets=[ast.Tuple()], value=ast.Tuple(elts=values)):
                return len(values) >= 3 and len({form(value) for value in values}) > 1
            case _:
                return False

    assert not [
        f"{relative(file)}:{node.lineno}"
        for file, tree in parse_all().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt) and has_unrelated_values(node)
    ]


def test_no_code_asks_which_engine_or_trainer_it_has():
    """The rest of the code knows engines and trainers by their protocols."""

    def implements_protocol(node: ast.ClassDef) -> bool:
        methods = {each.name for each in node.body if isinstance(each, ast.AsyncFunctionDef)}
        is_protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
        return not is_protocol and ("generate" in methods or {"step", "save", "load"} <= methods)

    classes = {
        node.name
        for tree in parse_all().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and implements_protocol(node)
    }
    assert {"NativeEngine", "RemoteEngine", "EnginePool", "PolicyTrainer", "DistributedTrainer"} <= classes

    def names_tested(node: ast.AST) -> set[str]:
        match node:
            case ast.Call(func=ast.Name(id="isinstance" | "issubclass"), args=[_, kinds]):
                return {name.id for name in ast.walk(kinds) if isinstance(name, ast.Name)}
            case ast.MatchClass(cls=ast.Name(id=name)):
                return {name}
            case _:
                return set()

    assert not [
        f"{relative(file)}:{node.lineno}"
        for file, tree in parse_all().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.expr | ast.pattern) and names_tested(node) & classes
    ]


# -- shared types, options, exports ---------------------------------------------------------


@pytest.mark.parametrize("module", [types, events], ids=["types", "events"])
def test_shared_types_are_frozen_and_slotted(module: ModuleType):
    shared = [t for t in vars(module).values() if dataclasses.is_dataclass(t) and t.__module__ == module.__name__]
    assert shared
    for kind in shared:
        assert kind.__dataclass_params__.frozen, kind  # pyright: ignore
        assert "__slots__" in vars(kind), kind


def all_options() -> list[Option]:
    """The options of every command; one that several commands share is there once."""
    found = (option for root in COMMAND_ROOTS for option in get_options(root).values())
    return list({(option.section, option.name): option for option in found}.values())


def test_every_option_is_described_in_one_sentence():
    for option in all_options():
        assert option.help[:1].isupper() or option.help[:1] == "|", option
        assert option.help.endswith(".") and "\n" not in option.help, option
        assert 12 < len(option.help) < 200, option
        assert not option.value_type.optional or option.default is None, f"{option}: an optional value defaults to None"


def test_every_section_of_the_config_is_frozen():
    for root in COMMAND_ROOTS:
        for section in (root, *(field.type for field in dataclasses.fields(root))):
            assert section.__dataclass_params__.frozen and "__slots__" in vars(section)  # pyright: ignore


def test_the_generated_list_of_options_is_up_to_date(regenerate: bool):
    """Adding a flag is a decision: run pytest with --regenerate to take it, and review the difference."""
    lines = [f"{option.section}\t{format_flag(option)}\t{format_value(option.default)}" for option in all_options()]
    compare(OPTIONS, lines, regenerate)


def test_the_generated_list_of_exported_names_is_up_to_date(regenerate: bool):
    """What core, the hooks and the root config offer to others."""
    modules = (
        "core.types",
        "core.protocols",
        "core.errors",
        "core.events",
        "hooks.load",
        "hooks.registry",
        "launch.config",
    )
    lines = [f"miles.{module}\t{name}" for module in modules for name in exported_names(module)]
    compare(EXPORTED, lines, regenerate)


def exported_names(module: str) -> Iterator[str]:
    """Public names defined in a module, in its order."""
    for node in parse_all()[SOURCE / f"{module.replace('.', '/')}.py"].body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            names = []
        yield from (name for name in names if not name.startswith("_"))


def compare(file: Path, lines: list[str], regenerate: bool) -> None:
    if regenerate:
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    known = file.read_text(encoding="utf-8").splitlines()
    new, gone = sorted(set(lines) - set(known)), sorted(set(known) - set(lines))
    assert lines == known, (
        f"{relative(file)} is out of date (new: {new}; gone: {gone}); if this was meant, run: "
        f"pytest {relative(Path(__file__))} --regenerate"
    )


def test_the_package_declares_the_data_files_it_ships():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    shipped = set(project["tool"]["setuptools"]["package-data"]["miles"])
    recipes = {"recipes/*.toml", "recipes/*/*.toml", "recipes/*/*.json"}  # through a link to the folder beside src
    assert (SOURCE / "recipes").resolve() == ROOT / "recipes" and recipes <= shipped
    assert shipped - recipes == {
        str(f.relative_to(SOURCE))
        for f in SOURCE.rglob("*")
        if f.is_file() and f.suffix not in (".py", ".pyc") and "recipes" not in f.relative_to(SOURCE).parts
    }
    assert project["project"]["scripts"] == {"miles": "miles.launch.main:main"}


def test_every_module_can_be_imported_by_its_name():
    names = {info.name for info in pkgutil.walk_packages(miles.__path__, "miles.")}
    files = {f.relative_to(SOURCE).with_suffix("") for f in FILES if f.name != "__init__.py"}
    assert {".".join(("miles", *file.parts)) for file in files} <= names


def test_the_commands_are_these():
    expected = (
        "train plan check demo recipes init adopt doctor eval chat show view report compare bundle engines stacks "
        "replay convert serve parity route"
    )
    assert list(COMMANDS) == expected.split()
