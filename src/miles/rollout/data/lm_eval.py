"""Tasks of lm-evaluation-harness as held-out prompts: ``lm_eval:TASK?num_fewshot=5``.

The package makes the prompts, with its own task objects, in a child process: it imports torch, and some tasks iterate
over sets. Run as a module, this is that process. The reward ``lm_eval`` grades with the same task objects.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast
from urllib.parse import parse_qsl

from miles.core.errors import DataError, UsageError

SCHEME = "lm_eval"
ENTRY = "lm_eval"
"""Metadata key of a prompt's task and document, for the reward."""
INSTALL = "pip install 'miles-rl[lm-eval]'"
_SETTINGS = ("num_fewshot", "seed", "include_path")
_DEFAULT_SEED = 1234  # of the few-shot sampler, as in the package
_GENERATE = "generate_until"
# Time limit for loading a task and making its prompts; the first time it may download the data.
_LOAD_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LmEvalTask:
    """A task by name. ``num_fewshot`` None is the task's own; ``include_path`` is a folder of tasks of your own."""

    name: str
    num_fewshot: int | None = None
    seed: int = _DEFAULT_SEED
    include_path: str | None = None


class TaskError(ValueError):
    """A task that cannot be used; the message is the end of a sentence that starts with its path."""


def is_lm_eval(path: str) -> bool:
    """Whether a path names a task of lm-evaluation-harness instead of a file."""
    return path.startswith(f"{SCHEME}:")


def parse_lm_eval(path: str) -> LmEvalTask:
    """Parse ``lm_eval:name?num_fewshot=5&seed=1234&include_path=folder``.

    >>> parse_lm_eval("lm_eval:gsm8k?num_fewshot=0").num_fewshot
    0
    """
    name, _, query = path.removeprefix(f"{SCHEME}:").partition("?")
    if not name:
        raise UsageError(f"{path} names no task; write {SCHEME}:gsm8k, for one.")
    try:
        settings = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=True)) if query else {}
    except ValueError as error:
        raise UsageError(f"{path}: what follows the ? must be settings, as in ?num_fewshot=0 ({error}).") from error
    for key in settings:
        if key not in _SETTINGS:
            raise UsageError(f"{path}: {key} is not a setting of {SCHEME}; there are {', '.join(_SETTINGS)}.")
    numbers: dict[str, int] = {}
    for key in ("num_fewshot", "seed"):
        if key in settings and not settings[key].isdecimal():
            raise UsageError(f"{path}: {key} must be a whole number from 0 on, and is {settings[key]!r}.")
        if key in settings:
            numbers[key] = int(settings[key])
    return LmEvalTask(
        name=name,
        num_fewshot=numbers.get("num_fewshot"),
        seed=numbers.get("seed", _DEFAULT_SEED),
        include_path=settings.get("include_path"),
    )


def list_entries(path: str) -> list[dict[str, Any]]:
    """All documents of a task, in its order: ``prompt``, ``target`` and the number of the document, ``doc_id``."""
    if find_spec(SCHEME) is None:
        raise DataError(f"{path} needs the package lm-eval, which is not installed; {INSTALL}.")
    parse_lm_eval(path)
    answer = _run_loader(path)
    if isinstance(answer, str):
        raise DataError(f"{path} {answer}")
    return answer


@cache
def _run_loader(path: str) -> list[dict[str, Any]] | str:
    """The entries, or what is wrong."""
    env = {"PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(place for place in sys.path if place)}
    try:
        process = subprocess.run(
            [sys.executable, "-m", __name__, path],
            capture_output=True,
            env={**os.environ, **env},
            check=False,
            timeout=_LOAD_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"was not loaded within {_LOAD_SECONDS:g} s; check that its data can be downloaded."
    if process.returncode:
        last = (process.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        return f"cannot be loaded ({last})."
    return cast("list[dict[str, Any]] | str", json.loads(process.stdout))


# -- with the package ------------------------------------------------------------------------


def load_task(task: LmEvalTask) -> Any:
    """Load a task object, set up as the package's evaluator does; TaskError where it cannot be used."""
    manager = _find_manager(task)
    if task.name in manager.all_groups or task.name in manager.all_tags:
        raise TaskError("is a group of tasks; name one of them, or each as a held-out set of its own.")
    if task.name not in manager.all_subtasks:
        close = get_close_matches(task.name, cast("Sequence[str]", manager.all_subtasks), n=1)
        hint = f"did you mean {close[0]}?" if close else "list them with lm-eval ls tasks."
        raise TaskError(f"is not a task of lm-eval; {hint}")
    loaded = manager.load([task.name])["tasks"][task.name]
    if task.num_fewshot is not None:
        loaded.set_config(key="num_fewshot", value=task.num_fewshot)
    elif loaded.get_config("num_fewshot") is None:
        loaded.set_config(key="num_fewshot", value=0)
    loaded.set_fewshot_seed(seed=task.seed)
    if loaded.OUTPUT_TYPE != _GENERATE:
        raise TaskError(
            f"compares log-likelihoods ({loaded.OUTPUT_TYPE}), and only tasks that generate text ({_GENERATE}) are "
            "supported; many have a variant that does, such as arc_challenge_chat for arc_challenge."
        )
    if loaded.config.doc_to_image or loaded.config.doc_to_audio:
        raise TaskError("has images or sound, which this connector does not pass on.")
    return loaded


def _find_manager(task: LmEvalTask) -> Any:
    """The index of your own tasks where the task is one of them, else that of all, which takes longer to build."""
    make = import_module("lm_eval.tasks").TaskManager
    if task.include_path is not None:
        own = make(include_path=task.include_path, include_defaults=False)
        if task.name in own.all_subtasks:
            return own
    return make(include_path=task.include_path)


def _build_entries(task: Any) -> list[dict[str, Any]]:
    task.build_all_requests()
    entries: list[dict[str, Any]] = []
    for instance in task.instances:
        entry = {"doc_id": instance.doc_id, "prompt": instance.args[0], "target": task.doc_to_target(instance.doc)}
        entries.append(entry)
    return entries


def main() -> None:
    """Write the entries of the task in the first argument to standard output, or the reason why there are none."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as out:
        os.dup2(2, 1)  # the package's prints must not mix with the reply
        try:
            answer: list[dict[str, Any]] | str = _build_entries(load_task(parse_lm_eval(sys.argv[1])))
        except TaskError as error:
            answer = str(error)
        json.dump(answer, out, default=str)


if __name__ == "__main__":
    main()
