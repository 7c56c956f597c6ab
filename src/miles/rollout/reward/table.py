"""The built-in rewards by name (``--rm-type``): a row each, and the names one may combine."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.core.errors import UsageError

How = Literal["here", "worker", "algebra", "built", "group"]
"""Where a grade is made.

``here``: a function of (reply, label, metadata) that ends whatever it is given, called at once.
``worker``: such a function, in a process of its own with a time limit.
``algebra``: a function of (reply, label) that finds the two answers to compare; first exactly, then symbolically.
``built``: a function of (means) that gives a core.protocols.RewardFn.
``group``: a function of (means) that gives a core.protocols.GroupRewardFn.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """A row: where the grade is made, by which function (``module:name`` in this room), and what it needs.

    ``packages`` come with the extra ``graders``; ``labelled`` asks for the prompt's label; ``boxable``
    says that ``boxed_`` before the name makes sense, and ``boxed`` by which function, when it is not
    enough to show the first one only what the box holds.
    """

    how: How
    address: str
    packages: tuple[str, ...] = ()
    labelled: bool = True
    boxable: bool = True
    boxed: str | None = None


BOXED = "boxed_"
RANDOM = "random"
_ALGEBRA = ("math_verify",)
GRADES: Mapping[str, Grader] = MappingProxyType(
    {
        "exact": Grader(how="here", address="text:exact"),
        "contains": Grader(how="here", address="text:contains"),
        "int": Grader(how="here", address="text:last_int"),
        "last_int": Grader(how="here", address="text:last_int"),
        "math": Grader(how="algebra", address="math:sides", boxed="math:sides", packages=_ALGEBRA),
        "math_exact": Grader(how="here", address="math:grade", boxed="math:grade"),
        "deepscaler": Grader(how="algebra", address="deepscaler:sides", boxed="deepscaler:sides", packages=_ALGEBRA),
        "dapo": Grader(how="here", address="dapo:grade", boxed="dapo:grade_boxed"),
        "gsm8k": Grader(how="here", address="gsm8k:grade"),
        "gpqa": Grader(how="here", address="gpqa:grade", labelled=False),
        "f1": Grader(how="here", address="text:f1"),
        "regex": Grader(how="worker", address="text:regex"),
        "json_schema": Grader(how="worker", address="schema:grade", packages=("jsonschema",), labelled=False),
        "ifbench": Grader(how="here", address="instructions.grade:grade", labelled=False),
        "ifeval": Grader(how="here", address="instructions.grade:grade", labelled=False),
        "code": Grader(how="built", address="graded:code_reward", labelled=False, boxable=False),
        "reasoning_gym": Grader(how="worker", address="gym:grade", packages=("reasoning_gym",), labelled=False),
        "remote_rm": Grader(how="built", address="remote:remote_reward", packages=("httpx",), labelled=False),
        "reward_model": Grader(how="built", address="remote:model_reward", packages=("httpx",), labelled=False),
        "llm_judge": Grader(
            how="group", address="judge:judge_reward", packages=("httpx",), labelled=False, boxable=False
        ),
        RANDOM: Grader(how="built", address="chance:random_reward", labelled=False, boxable=False),
        "deterministic_random": Grader(how="here", address="chance:deterministic_random", labelled=False),
    }
)


@dataclass(frozen=True, slots=True)
class Part:
    """One reward of a mixture and its weight."""

    name: str
    weight: float

    @property
    def row(self) -> Grader:
        """Its row of the table, with or without ``boxed_``."""
        return GRADES[self.name] if self.name in GRADES else GRADES[self.name.removeprefix(BOXED)]

    @property
    def boxed(self) -> bool:
        """Whether it is shown only the boxed answer."""
        return self.name not in GRADES


def parts_of(rm_type: str) -> tuple[Part, ...]:
    """The rewards a value of ``--rm-type`` names: one, or several as in ``math:0.9+json_schema:0.1``.

    >>> parts_of("math"), parts_of("boxed_int:2+f1")[1]
    ((Part(name='math', weight=1.0),), Part(name='f1', weight=1.0))
    """
    parts = tuple(_part(rm_type, text.strip()) for text in rm_type.split("+"))
    names = [part.name for part in parts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--rm-type {rm_type} names {min(twice)} twice; give it one weight.")
    return parts


def is_group(rm_type: str) -> bool:
    """Whether a part of it compares all attempts at a prompt."""
    return any(part.row.how == "group" for part in parts_of(rm_type))


def check_name(rm_type: str) -> None:
    """Refuse a name that is not in the table, with a hint, and one whose packages are not installed."""
    for part in parts_of(rm_type):
        missing = [package for package in part.row.packages if importlib.util.find_spec(package) is None]
        if missing:
            instead = ", or use math_exact, which compares notation and rational values" * (part.row.how == "algebra")
            raise UsageError(
                f"--rm-type {part.name} needs the package {missing[0].replace('_', '-')}; "
                f"install it with pip install 'miles-rl[graders]'{instead}."
            )


def _part(rm_type: str, text: str) -> Part:
    name, colon, weight = text.partition(":")
    try:
        part = Part(name, float(weight) if colon else 1.0)
    except ValueError as error:
        raise UsageError(f"--rm-type {rm_type}: the weight of {name} is {weight!r}, which is not a number.") from error
    if not math.isfinite(part.weight):
        raise UsageError(f"--rm-type {rm_type}: the weight of {name} must be finite.")
    _check_known(name)
    return part


def _check_known(name: str) -> None:
    inner = name.removeprefix(BOXED)
    if name in GRADES or (inner in GRADES and GRADES[inner].boxable):
        return
    close = difflib.get_close_matches(inner, GRADES, n=1)
    hint = f"did you mean {close[0]}?" if close else "or bring your own with --custom-rm-path."
    raise UsageError(f"--rm-type {name} is not a built-in reward; there are {', '.join(GRADES)}; {hint}")
