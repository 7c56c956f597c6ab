"""Options of the library: names are those of the flags with underscores, read and checked as the command line is.

Each named option becomes its flag, so that a value is parsed, checked and refused with the same sentence, and the run's
``config.toml`` is the same as that of ``miles train``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from miles.algo.config import OFFLINE_LOSSES
from miles.api.functions import register_function
from miles.config.cli import is_flag
from miles.config.schema import flag_from_name, get_options
from miles.core.errors import UsageError
from miles.launch.config import Config

_LOSSES: Mapping[str, str] = {"sft": "sft_loss", "dpo": "dpo_loss", "reward_model": "rm_loss"}
"""Algorithms that are a loss on responses of the data."""


def build_argv(options: Mapping[str, Any]) -> list[str]:
    """The command line of named options: True is a switch, False and None turn one off, a list is several words.

    >>> build_argv({"lr": 1e-6, "rollout_shuffle": True, "label_key": None, "rollout_stop": ["a", "b"]})
    ['--lr=1e-06', '--rollout-shuffle', '--no-label-key', '--rollout-stop', 'a', 'b']
    """
    return [word for name, value in options.items() for word in _build_words(name, value)]


def list_algorithm_options(algorithm: str) -> dict[str, str]:
    """The options that an algorithm's name stands for.

    >>> list_algorithm_options("grpo"), list_algorithm_options("sft")
    ({'advantage_estimator': 'grpo'}, {'loss_type': 'sft_loss'})
    """
    if algorithm in _LOSSES or algorithm in OFFLINE_LOSSES:
        return {"loss_type": _LOSSES.get(algorithm, algorithm)}
    estimators = get_options(Config)["advantage_estimator"].value_type.choices
    if algorithm not in estimators:
        raise UsageError(f"algorithm {algorithm!r} is not one of {', '.join((*estimators, *_LOSSES))}.")
    return {"advantage_estimator": algorithm}


def _build_words(name: str, value: Any) -> list[str]:
    flag = flag_from_name(name)
    if value is True:
        return [flag]
    if value is None or value is False:
        return [f"--no-{flag[2:]}"]
    if isinstance(value, Sequence) and not isinstance(value, str):
        words = [_format_word(name, item) for item in value]
        if (wrong := next(filter(is_flag, words), None)) is not None:
            raise UsageError(f"{name} has the value {wrong!r}, which looks like a flag; give it in a recipe instead.")
        return [flag, *words] if words else [f"--no-{flag[2:]}"]
    return [f"{flag}={_format_word(name, value)}"]


def _format_word(name: str, value: Any) -> str:
    if isinstance(value, str | PurePath):
        return os.fspath(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, Mapping):
        return _format_table(name, value)
    if isinstance(value, Callable):
        return register_function(value, default_name=name)
    raise UsageError(f"{name} is a {type(value).__name__}; give a number, a text, a list, a dictionary or a function.")


def _format_table(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{name} cannot be written as JSON ({error}); give texts, numbers, lists and tables."
        ) from error
