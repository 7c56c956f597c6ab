"""Procedural prompts: ``reasoning_gym:task?size=500&seed=0`` as a data source.

Entries are generated in a child process with Python's hash seed fixed: some tasks iterate over sets, and would
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
_DEFAULT_SIZE, _DEFAULT_SEED = 500, 0
_ENTRIES, _ERROR = "entries", "complaint"
# Time limit for generating all entries of a task.
_GENERATE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProceduralTask:
    """A task of ``reasoning_gym`` with its settings, ``size`` and ``seed`` always among them.

    ``rm_type`` is the reward of its prompts, where one was named.
    """

    name: str
    settings: Mapping[str, Any]
    rm_type: str | None = None

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.settings["size"]


def is_procedural(path: str) -> bool:
    """Whether a path names a procedural task instead of a file."""
    return path.startswith(f"{SCHEME}:")


def parse_task(path: str) -> ProceduralTask:
    """Parse ``reasoning_gym:name?size=500&seed=0&key=value``; after the ``?`` may also be one JSON object.

    Values are JSON where they parse as such, else text. All but ``rm_type`` are the task's settings.

    >>> parse_task("reasoning_gym:leg_counting?size=20&max_animals=4").settings
    {'size': 20, 'seed': 0, 'max_animals': 4}
    """
    name, _, query = path.removeprefix(f"{SCHEME}:").partition("?")
    if not name:
        raise UsageError(f"{path} names no task; write {SCHEME}:leg_counting, for one.")
    settings = {"size": _DEFAULT_SIZE, "seed": _DEFAULT_SEED} | _settings(path, query)
    for key, least in (("size", 1), ("seed", 0)):
        if type(settings[key]) is not int or settings[key] < least:
            raise UsageError(f"{path}: {key} must be a whole number from {least} on, and is {settings[key]!r}.")
    rm_type = settings.pop("rm_type", None)
    if rm_type is not None and not isinstance(rm_type, str):
        raise UsageError(f"{path}: rm_type must be the name of a reward, and is {rm_type!r}.")
    return ProceduralTask(name=name, settings=settings, rm_type=rm_type)


def find_task_problem(path: str) -> str | None:
    """Why a task cannot be generated, in one sentence: an unknown name or setting, a missing package; None if it
    can."""
    try:
        _request(path, range(0))
    except DataError as error:
        return str(error)
    return None


def generate_entries(path: str, indices: range) -> list[dict[str, Any]]:
    """Generate the entries with these indices: ``question``, ``answer`` and ``metadata``."""
    return _request(path, indices)


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


# -- the generator process -------------------------------------------------------------------


def _request(path: str, indices: range) -> list[dict[str, Any]]:
    if find_spec(SCHEME) is None:
        raise DataError(
            f"{path} needs the package reasoning-gym, which is not installed; pip install miles-rl[graders]."
        )
    task = parse_task(path)
    kind, answer = _run_generator(json.dumps([task.name, dict(task.settings), indices.start, indices.stop]))
    if kind == _ERROR:
        raise DataError(f"{path}: {answer}")
    return cast("list[dict[str, Any]]", answer)


@cache
def _run_generator(request: str) -> tuple[str, Any]:
    env = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__],
            input=request.encode(),
            capture_output=True,
            env={**os.environ, **env},
            check=False,
            timeout=_GENERATE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return _ERROR, f"the process that makes the entries was not done within {_GENERATE_SECONDS:g} s; ask for fewer."
    if process.returncode:
        last = (process.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        return _ERROR, f"the process that makes the entries failed ({last})."
    # Trusted: our own child process. Pickle keeps tuples and number keys, which the library's scorers need.
    return pickle.loads(process.stdout)


def _generate(name: str, settings: dict[str, Any], start: int, stop: int) -> tuple[str, Any]:
    """Generate the entries, or describe what is wrong with the request."""
    import_module(SCHEME)
    datasets: dict[str, tuple[Any, Any]] = import_module(f"{SCHEME}.factory").DATASETS
    if name not in datasets:
        return _ERROR, f"reasoning_gym has no task {name}{_did_you_mean(name, datasets)}"
    setting_names = [field.name for field in fields(datasets[name][1])]
    for key in settings:
        if key not in setting_names:
            return (
                _ERROR,
                f"{name} has no setting {key}, only {', '.join(setting_names)}{_did_you_mean(key, setting_names)}",
            )
    try:
        config = datasets[name][1](**settings)
        config.validate()
        tasks = datasets[name][0](config=config)
        return _ENTRIES, [_with_source_name(tasks[index], name) for index in range(start, stop)]
    except (AssertionError, TypeError, ValueError) as error:
        return _ERROR, f"{name} does not take these settings ({error})."


def _with_source_name(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """The entry with the name by which its scorer is found."""
    return {**entry, "metadata": {"source_dataset": name, **entry.get("metadata", {})}}


def _did_you_mean(name: str, datasets: Sequence[str] | Mapping[str, Any]) -> str:
    close = get_close_matches(name, list(datasets), n=1)
    return f"; did you mean {close[0]}?" if close else "."


def main() -> None:
    """Generate what standard input asks for (JSON: task, settings, start, stop), and write it to standard output."""
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # a task's prints must not mix with the reply
        pickle.dump(_generate(*json.load(sys.stdin)), out)


if __name__ == "__main__":
    main()
