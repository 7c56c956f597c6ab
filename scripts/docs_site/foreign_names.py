"""Names of other projects on the migration pages, held against the packages they are of.

pip download --no-deps trl verl openrlhf && python scripts/docs_site/foreign_names.py *.whl

Prints every name in the first column of a page's tables that its package does not have. TRL's names include those of
transformers' TrainingArguments, which are read from the installed package.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

DOCS = Path(__file__).parents[2] / "docs"
FIELD = re.compile(r"^    (\w+):", re.MULTILINE)


def read_member(wheel: Path, ending: str) -> str:
    """The text of the file of a wheel whose path ends so."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(ending))
        return archive.read(name).decode()


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Every key of nested tables with those above it."""
    for key, value in values.items():
        yield f"{prefix}{key}"
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")


def read_trl(wheel: Path) -> set[str]:
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    arguments = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
    return {*FIELD.findall(read_member(wheel, "trl/trainer/grpo_config.py")), *FIELD.findall(arguments)}


def read_verl(wheel: Path) -> set[str]:
    return set(flatten(yaml.safe_load(read_member(wheel, "verl/trainer/config/_generated_ppo_trainer.yaml"))))


def read_openrlhf(wheel: Path) -> set[str]:
    source = read_member(wheel, "openrlhf/cli/train_ppo_ray.py")
    for_both = [name.replace("{prefix}", part) for name in FLAG_OF_BOTH.findall(source) for part in ("actor", "critic")]
    return {*re.findall(r'"--([\w.]+)"', source), *for_both}


FLAG_OF_BOTH = re.compile(r'f"--([\w.{}]+)"')
# The part of a page with names, and how they are read from the wheel.
PAGES = {
    "trl": ("## GRPOConfig", read_trl),
    "verl": ("## Keys", read_verl),
    "openrlhf": ("## Flags", read_openrlhf),
}


def list_names(page: str, heading: str) -> Iterator[list[str]]:
    """The names in the first column, row by row."""
    for line in page.split(heading)[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            yield re.findall(r"`([\w.]+)[=\"\w]*`", line.split("|")[1])


def find_unknown(names: list[str], known: set[str]) -> Iterator[str]:
    """Names of a row that are not known; a short one has the prefix of the one before it."""
    prefix = ""
    for name in names:
        full = name if name in known else f"{prefix}.{name}"
        if full in known:
            prefix = full.rpartition(".")[0]
        else:
            yield name


def main(wheels: list[Path]) -> int:
    """Check each wheel's page; returns 1 if a name does not exist, or if the page names another version."""
    problems: list[str] = []
    for wheel in wheels:
        package, version = wheel.name.split("-")[:2]
        heading, read = PAGES[package]
        page = (DOCS / f"migrate_{package}.md").read_text(encoding="utf-8")
        known, rows = read(wheel), list(list_names(page, heading))
        problems += [f"{package}: {name}" for names in rows for name in find_unknown(names, known)]
        problems += [] if f" {version}" in page else [f"{package}: the page does not name version {version}"]
        print(f"{package} {version}: {sum(len(names) for names in rows)} names")
    for problem in problems:
        print(problem)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]]))
