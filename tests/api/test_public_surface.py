"""What ``import miles`` exports: a reviewed list with signatures, typed and documented; the import stays light."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import miles
from miles.api.train import train

SURFACE = Path(__file__).parent / "public_surface.txt"
STUB = Path(miles.__file__).with_suffix(".pyi")
HEAVY = ("torch", "numpy", "transformers", "rich", "pyarrow", "matplotlib", "safetensors")


def get_export(name: str) -> Any:
    """The exported object; ``miles.train`` is a package that is called as the function."""
    return train if name == "train" else getattr(miles, name)


def list_members(export: Any) -> list[tuple[str, Any]]:
    """Public functions and properties of a class, inherited ones of ours included."""
    found = inspect.getmembers_static(export) if inspect.isclass(export) else []
    return [
        (name, member.fget if isinstance(member, property) else member)
        for name, member in found
        if not name.startswith("_") and isinstance(member, FunctionType | property)
    ]


def describe(name: str) -> list[str]:
    export = get_export(name)
    if not inspect.isclass(export):
        return [f"miles.{name}{inspect.signature(export)}"]
    if issubclass(export, Exception):
        return [f"miles.{name}"]
    members = [f"miles.{name}.{member}{inspect.signature(function)}" for member, function in list_members(export)]
    return [f"miles.{name}{inspect.signature(export)}", *members]


def test_the_generated_list_of_the_public_surface_is_up_to_date(regenerate: bool):
    lines = [line for name in sorted(miles.__all__) for line in describe(name)]
    if regenerate:
        SURFACE.write_text("\n".join(lines) + "\n")
    assert lines == SURFACE.read_text().splitlines(), "if this was meant, run pytest with --regenerate"


def list_callables() -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in miles.__all__:
        export = get_export(name)
        found += [(f"{name}.{member}", function) for member, function in list_members(export)]
        found += [] if inspect.isclass(export) else [(name, export)]
    return found


@pytest.mark.parametrize("name", miles.__all__)
def test_every_export_is_documented(name: str):
    documented = [get_export(name), *(function for _, function in list_members(get_export(name)))]
    assert all(inspect.getdoc(each) for each in documented)


def test_every_export_is_typed():
    for name, function in list_callables():
        signature = inspect.signature(function)
        assert signature.return_annotation is not inspect.Signature.empty, name
        untyped = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name != "self"]
        assert not untyped, (name, untyped)


def test_every_verb_has_an_async_form():
    plain = [name for name, _ in list_members(miles.Policy) if not name.endswith("_async")]
    local = {"read_prompts", "read_demonstrations", "version"}  # they read data, or a number
    for name in set(plain) - local:
        sync, awaited = getattr(miles.Policy, name), getattr(miles.Policy, f"{name}_async")
        assert inspect.signature(sync) == inspect.signature(awaited) and inspect.iscoroutinefunction(awaited)


def test_type_checkers_see_the_same_names():
    names = [line.rpartition(" as ")[2] for line in STUB.read_text().splitlines() if " as " in line]
    assert sorted(names) == sorted(miles.__all__) and set(miles.__all__) <= set(dir(miles))


def test_importing_it_loads_nothing_heavy():
    code = (
        "import sys, miles\n"
        f"found = set({HEAVY!r}) & set(sys.modules)\n"
        "sys.exit(f'import miles loads {found}' if found else 0)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_package_of_the_trainer_is_called_as_the_function():
    import miles.train as package

    assert package is miles.train and callable(package)
    assert inspect.signature(miles.train) == inspect.signature(train)
    assert miles.train.config.TrainConfig is not None
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        miles.trian  # noqa: B018
