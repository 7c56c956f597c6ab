"""Grader types: scores, errors, the response text that graders read, and the validation of what they return."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from miles.core.errors import HookError
from miles.core.types import EMPTY, Prompt, Reward, Trajectory

Score = float | Mapping[str, float]
"""One number, or several by name, of which ``score`` is the value and all are parts of the reward."""

Metadata = Mapping[str, Any]
"""The prompt's metadata column, as the data file gave it."""


class BadLabel(ValueError):
    """A label or metadata that cannot be used for grading: an error in the data. The message names no prompt."""


class GradingError(Exception):
    """A grade that could not be computed: the grader hung, died or did not answer. The trajectory stays unscored."""


class NonRetryableError(GradingError):
    """A failed request that would fail again if repeated."""


def get_response_text(name: str, trajectory: Trajectory) -> str:
    """The response text, which the generate function stores in ``metadata["text"]``."""
    reply = trajectory.metadata.get("text")
    if reply is None:
        raise HookError(
            f"The {name} reward grades text, and the generate function stored none in metadata['text']; "
            "store the response there or use --custom-rm-path."
        )
    return reply


def check_reward(reward: Any, *, source: str, prompt: Prompt, key: str | None = None) -> Reward:
    """The reward with plain finite numbers; HookError for anything else that the user's function gave.

    ``source`` names the function. With ``key``, the part of that name becomes the value.
    """
    is_plain = type(reward) is Reward and reward.parts is EMPTY and type(reward.value) is float
    if is_plain and key is None and math.isfinite(reward.value):
        return reward
    where = f"{source}: the reward of prompt {prompt.id}"
    if not isinstance(reward, Reward):  # user functions are not type-checked before they run
        raise HookError(f"{where} is {_describe(reward)}; return miles.core.types.Reward(value=...).")
    if not isinstance(reward.parts, Mapping):
        raise HookError(f"{where} has {_describe(reward.parts)} as its parts; give a dict of numbers by name.")
    parts = {str(name): _check_number(part, f"{where}, part {name},") for name, part in reward.parts.items()}
    if key is None:
        return Reward(value=_check_number(reward.value, where), parts=parts)
    if key not in parts:
        found = ", ".join(parts) or "none"
        raise HookError(f"{where} has no part {key} (found: {found}); name one of its parts with --reward-key.")
    return Reward(value=parts[key], parts=parts)


def check_group_rewards(rewards: Any, *, source: str, prompt: Prompt, count: int) -> Sequence[Any]:
    """What a group reward gave, if it is a sequence of ``count`` rewards; HookError otherwise."""
    if not isinstance(rewards, Sequence) or isinstance(rewards, str | bytes):
        raise HookError(
            f"{source}: the group reward gave {_describe(rewards)} for prompt {prompt.id}; return a list with one "
            "miles.core.types.Reward for each trajectory, in order."
        )
    if len(rewards) != count:
        raise HookError(
            f"{source}: the group reward gave {len(rewards)} rewards for the {count} trajectories of prompt "
            f"{prompt.id}; it must give one for each, in order."
        )
    return rewards


def _check_number(value: Any, where: str) -> float:
    try:
        if type(value) is not float and (isinstance(value, str | bytes) or np.ndim(value) != 0):
            raise TypeError
        number = float(value)
    except Exception as error:  # whatever a user's own type raises
        raise HookError(f"{where} is {_describe(value)}; a reward must be a finite number.") from error
    if not math.isfinite(number):
        raise HookError(f"{where} is {number}; a reward must be a finite number.")
    return number


def _describe(value: Any) -> str:
    """A value for an error message: its type and the beginning of its representation."""
    kind = type(value).__name__
    if value is None:
        return "None"
    try:
        text = reprlib.repr(value)
    except Exception:  # whatever a user's own type raises
        return f"a {kind}"
    return f"the {kind} {' '.join(text.split())}"
