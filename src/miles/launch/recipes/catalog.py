"""Catalog of the recipes: what each is for, on which hardware, and what was tried. No torch."""

from __future__ import annotations

import os.path
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import miles
from miles.config.cli import parse
from miles.config.files import Layer, read_layers
from miles.core.errors import UsageError
from miles.launch.config import Config

_KEYS = {
    "title": str,
    "family": str,
    "shape": str,
    "task": str,
    "hardware": str,
    "nodes": int,
    "gpus_per_node": int,
    "gpu_gb": int,
    "host_gb": int,
    "data": str,
    "expect": str,
    "tried": str,
    "curve": str,
}
_SHARED_FOLDERS = ("hardware", "tasks")
PLANNED_ONLY = "planned only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines a recipe is for; sizes in GB (10⁹ bytes), ``host_gb`` of one node. No GPU means a CPU."""

    name: str
    nodes: int
    gpus_per_node: int
    gpu_gb: int
    host_gb: int

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe of the catalog.

    ``name`` is its path in the folder, without suffix; ``model`` its --hf-checkpoint, None where the user brings one;
    ``shape`` the published model it is planned with. ``hardware`` is None where any will do. ``tried`` says what was
    really run; ``curve`` is the file of its reference curve, where it was.
    """

    name: str
    path: Path
    layers: tuple[Layer, ...]
    title: str
    family: str
    task: str
    model: str | None
    shape: str | None
    hardware: Hardware | None
    data: str
    expect: str
    tried: str
    curve: Path | None


def find_recipes_folder() -> Path:
    """The folder of the recipes: that of the checkout the package is imported from, else in the package."""
    package = Path(miles.__file__).parent
    for folder in (package.parents[1] / "recipes", package / "recipes"):
        if (folder / "base.toml").is_file():
            return folder
    raise UsageError("The recipes are not installed with this package; get the folder recipes/ of the repository.")


def list_recipes() -> list[Recipe]:
    """Every recipe, by name; bases of hardware and tasks are no recipes."""
    folder = find_recipes_folder()
    paths = sorted(path for path in folder.rglob("*.toml") if path.relative_to(folder).parts[0] not in _SHARED_FOLDERS)
    return [read_recipe(path, folder) for path in paths if path != folder / "base.toml"]


def find_recipe(name: str) -> Recipe:
    """The recipe of that name, or in the file of that path; UsageError names similar ones."""
    if name.endswith(".toml") and Path(name).is_file():
        return read_recipe(Path(name), Path(name).parent)
    folder, wanted = find_recipes_folder(), name.removeprefix("recipes/").removesuffix(".toml")
    path = folder / f"{wanted}.toml"
    if path.is_file() and path.relative_to(folder).parts[0] not in _SHARED_FOLDERS and wanted != "base":
        return read_recipe(path, folder)
    names = [recipe.name for recipe in list_recipes()]
    near = [each for each in names if wanted and wanted in each][:5] or get_close_matches(
        wanted, names, n=3, cutoff=0.4
    )
    hint = f"did you mean {' or '.join(near)}?" if near else "miles recipes lists them."
    raise UsageError(f"{name} is not a recipe; {hint}")


def read_recipe(path: Path, folder: Path) -> Recipe:
    """The recipe in a file of ``folder``; UsageError for a description that is wrong or incomplete."""
    layers = read_layers(str(path))
    about = merge_about(layers)
    missing = [key for key in ("title", "family", "task", "data", "expect", "tried") if key not in about]
    if missing:
        raise UsageError(f"{path} does not say {', '.join(missing)}; add it to its table [recipe].")
    model = _get_value(layers, "hf_checkpoint")
    curve = about.get("curve")
    return Recipe(
        name=path.relative_to(folder).with_suffix("").as_posix(),
        path=path,
        layers=layers,
        title=about["title"],
        family=about["family"],
        task=about["task"],
        model=model,
        shape=about.get("shape", model),
        hardware=read_hardware(path, about),
        data=about["data"],
        expect=about["expect"],
        tried=about["tried"],
        curve=None if curve is None else path.parent / curve,
    )


def select_recipes(
    recipes: Sequence[Recipe], *, family: str | None, hardware: str | None, task: str | None
) -> list[Recipe]:
    """Those whose family, hardware and task contain the given words, whatever their case."""

    def matches(word: str | None, value: str) -> bool:
        return word is None or word.lower() in value.lower()

    return [
        recipe
        for recipe in recipes
        if matches(family, recipe.family)
        and matches(task, recipe.task)
        and matches(hardware, "any" if recipe.hardware is None else recipe.hardware.name)
    ]


def parse_recipe(recipe: Recipe) -> Config:
    """The config of a recipe without flags and rules; UsageError for keys that do not exist."""
    result = parse(Config, (), recipe.layers)
    if result.problems or result.config is None:
        raise UsageError(result.problems)
    return result.config


def merge_about(layers: Sequence[Layer]) -> dict[str, Any]:
    """The description of a recipe by its layers, where later wins; UsageError for keys that do not exist."""
    merged: dict[str, Any] = {}
    problems: list[str] = []
    for layer in layers:
        for key, value in layer.about.items():
            if key not in _KEYS:
                problems.append(f"{layer.label}: [recipe] has no key {key}; there are {', '.join(_KEYS)}.")
            elif type(value) is not _KEYS[key]:
                kind = "text" if _KEYS[key] is str else "a whole number"
                problems.append(f"{layer.label}: {key} of [recipe] must be {kind}, not {value!r}.")
            merged[key] = value
    if problems:
        raise UsageError(problems)
    return merged


def read_hardware(path: Path, about: Mapping[str, Any]) -> Hardware | None:
    """The hardware of a description; None where it names none, UsageError where it does not say its size."""
    if "hardware" not in about:
        return None
    sizes = {key: about.get(key) for key in ("nodes", "gpus_per_node", "gpu_gb", "host_gb")}
    if missing := [key for key, size in sizes.items() if size is None]:
        raise UsageError(f"{path} names the hardware {about['hardware']}, but not its {', '.join(missing)}; add them.")
    return Hardware(name=about["hardware"], **{key: int(size or 0) for key, size in sizes.items()})


def _get_value(layers: Sequence[Layer], name: str) -> Any:
    """The value of an option in files, in a section or outside."""
    found = None
    for layer in layers:
        tables = [layer.values, *(table for table in layer.values.values() if isinstance(table, dict))]
        found = next((table[name] for table in tables if name in table), found)
    return found


def describe_path(path: Path) -> str:
    """A path as a user would write it here."""
    relative = os.path.relpath(path)
    return relative if not relative.startswith("..") else str(path)
