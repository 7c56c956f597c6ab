"""Reader of --eval-config: named held-out sets, each with data, sampling and grader of its own.

    eval:
      defaults: {temperature: 0.6, max_response_len: 4096}
      datasets:
        - {name: aime, path: aime.jsonl, rm_type: math, n_samples_per_eval_prompt: 16}

The sets become --eval-prompt-data and --eval-options, so that a run's config has them all.
"""

from collections.abc import Mapping
from typing import Any

from miles.config.files import Layer, read_layers
from miles.config.schema import get_options
from miles.config.value_types import InvalidValue
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.rollout.eval_options import EVAL_KEYS, METADATA_OVERRIDES

_SHAPE = "write eval: {defaults: {...}, datasets: [{name: ..., path: ...}]}"


def read_eval_config(path: str) -> Layer:
    """The options that a file of held-out sets stands for; relative paths in it start at the working directory."""
    content = read_layers(path)[-1].values
    content = content.get("eval", content)
    if not isinstance(content, dict) or not isinstance(content.get("datasets"), list):
        raise UsageError([f"--eval-config {path} names no datasets; {_SHAPE}."])
    problems: list[str] = []
    defaults = content.get("defaults") or {}
    pairs: list[str] = []
    options: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(content["datasets"], 1):
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("name"), str)
            or not isinstance(entry.get("path"), str)
        ):
            problems.append(f"--eval-config {path}: dataset {number} needs a name and a path, both texts.")
            continue
        name = entry["name"]
        if name in options:
            problems.append(f"--eval-config {path}: two datasets are called {name}; rename one.")
        pairs += [name, entry["path"]]
        options[name] = {k: v for k, v in (defaults | entry).items() if k not in ("name", "path") and v is not None}
        problems += [f"--eval-config {path}: {problem}" for problem in _check_keys(name, options[name])]
    if problems:
        raise UsageError(list(dict.fromkeys(problems)))
    return Layer(label=path, values={"eval_prompt_data": pairs, "eval_options": options}, folder="")


def _check_keys(name: str, values: Mapping[str, Any]) -> list[str]:
    known = get_options(Config)
    problems: list[str] = []
    for key, value in values.items():
        if key == METADATA_OVERRIDES:
            if not isinstance(value, dict):
                problems.append(f"{key} of {name} must be a table.")
        elif key not in EVAL_KEYS:
            problems.append(f"{key} of {name} is not a key of a dataset; there are {', '.join(EVAL_KEYS)}.")
        else:
            option = known[EVAL_KEYS[key]]
            try:
                option.check_range(option.value_type.from_file(value))
            except InvalidValue as error:
                problems.append(f"{key} of {name} {error}.")
    return problems
