"""Prompts that a library makes up: ``reasoning_gym:task?size=500&seed=0`` as a source of data.

Entries are made by a process of their own with Python's hash seed fixed: some tasks walk through sets, and would
otherwise give another run other questions under the same seed. Run as a module, this is that process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast
from urllib.parse import parse_qsl

from miles.core.errors import DataError, UsageError

SCHEME = "reasoning_gym"
_SIZE, _SEED = 500, 0
_ENTRIES, _COMPLAINT = "entries", "complaint"
# Seconds in which all entries of a task must have been made.
_MAKING = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One generator of ``reasoning_gym`` and its settings, ``size`` and ``seed`` always among them.

    ``rm_type`` is the reward its prompts ask for themselves, where one was named.
    """

    name: str
    settings: Mapping[str, Any]
    rm_type: str | None = None

    @property
    def size(self) -> int:
        """How many entries it makes."""
        return self.settings["size"]


def is_generated(path: str) -> bool:
    """Whether a path names a task to generate from, instead of a file."""
    return path.startswith(f"{SCHEME}:")


def task_of(path: str) -> Task:
    """Read ``reasoning_gym:name?size=500&seed=0&key=value``; after the ``?`` may also stand one JSON object.

    Values are JSON where they can be read as such, and text otherwise. All but ``rm_type`` are the task's settings.

    >>> task_of("reasoning_gym:leg_counting?size=20&max_animals=4").settings
    {'size': 20, 'seed': 0, 'max_animals': 4}
    """
    name, _, query = path.removeprefix(f"{SCHEME}:").partition("?")
    if not name:
        raise UsageError(f"{path} names no task; write {SCHEME}:leg_counting, for one.")
    settings = {"size": _SIZE, "seed": _SEED} | _settings(path, query)
    for key, least in (("size", 1), ("seed", 0)):
        if type(settings[key]) is not int or settings[key] < least:
            raise UsageError(f"{path}: {key} must be a whole number from {least} on, and is {settings[key]!r}.")
    rm_type = settings.pop("rm_type", None)
    if rm_type is not None and not isinstance(rm_type, str):
        raise UsageError(f"{path}: rm_type must be the name of a reward, and is {rm_type!r}.")
    return Task(name=name, settings=settings, rm_type=rm_type)


def why_not(path: str) -> str | None:
    """What keeps a task from being generated, as a sentence: an unknown name or setting, a package that is missing."""
    try:
        _ask(path, range(0))
    except DataError as error:
        return str(error)
    return None


def generate(path: str, chosen: range) -> list[dict[str, Any]]:
    """The entries with these numbers: ``question``, ``answer`` and ``metadata``, as the library makes them."""
    return _ask(path, chosen)


def _settings(path: str, query: str) -> dict[str, Any]:
    try:
        if query.lstrip().startswith("{"):
            return cast("dict[str, Any]", json.loads(query))
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise UsageError(
            f'{path}: what follows the ? must be settings, as in ?size=100&seed=1 or ?{{"size": 100}} ({error}).'
        ) from error
    return {key: _value(text) for key, text in pairs}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# -- the process that makes them ------------------------------------------------------------


def _ask(path: str, chosen: range) -> list[dict[str, Any]]:
    if find_spec(SCHEME) is None:
        raise DataError(
            f"{path} needs the package reasoning-gym, which is not installed; pip install miles-rl[graders]."
        )
    task = task_of(path)
    kind, answer = _answer(json.dumps([task.name, dict(task.settings), chosen.start, chosen.stop]))
    if kind == _COMPLAINT:
        raise DataError(f"{path}: {answer}")
    return cast("list[dict[str, Any]]", answer)


@cache
def _answer(order: str) -> tuple[str, Any]:
    around = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    try:
        made = subprocess.run(
            [sys.executable, "-m", __name__],
            input=order.encode(),
            capture_output=True,
            env={**os.environ, **around},
            check=False,
            timeout=_MAKING,
        )
    except subprocess.TimeoutExpired:
        return _COMPLAINT, f"the process that makes the entries was not done within {_MAKING:g} s; ask for fewer."
    if made.returncode:
        last = (made.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        return _COMPLAINT, f"the process that makes the entries failed ({last})."
    # Between this program and itself: tuples and numbers as keys survive, which the library's scorers need.
    return pickle.loads(made.stdout)


def _make(name: str, settings: dict[str, Any], start: int, stop: int) -> tuple[str, Any]:
    """The entries, or what is wrong with the order."""
    import_module(SCHEME)
    known: dict[str, tuple[Any, Any]] = import_module(f"{SCHEME}.factory").DATASETS
    if name not in known:
        return _COMPLAINT, f"reasoning_gym has no task {name}{_near(name, known)}"
    own = [field.name for field in fields(known[name][1])]
    for key in settings:
        if key not in own:
            return _COMPLAINT, f"{name} has no setting {key}, only {', '.join(own)}{_near(key, own)}"
    try:
        config = known[name][1](**settings)
        config.validate()
        tasks = known[name][0](config=config)
        return _ENTRIES, [_whole(tasks[index], name) for index in range(start, stop)]
    except (AssertionError, TypeError, ValueError) as error:
        return _COMPLAINT, f"{name} does not take these settings ({error})."


def _whole(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry with the name its scorer is found by."""
    return {**entry, "metadata": {"source_dataset": name, **entry.get("metadata", {})}}


def _near(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def main() -> None:
    """Make what standard input (JSON: task, settings, first and last number) asks for, and write it out."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # a task that prints must not print into the answer
        pickle.dump(_make(*json.load(sys.stdin)), out)


if __name__ == "__main__":
    main()
