"""Registry of built-in rewards (``--rm-type``), and parsing of weighted combinations."""

from __future__ import annotations

import difflib
import importlib.util
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.core.errors import UsageError

GraderKind = Literal["inline", "worker", "math", "built", "group"]
"""Where and kind a grade is computed.

``inline``: a function of (response, label, metadata) that always terminates, called in this process.
``worker``: such a function, in a worker process with a time limit.
``math``: a function of (response, label) that extracts the two answers; compared exactly, then symbolically.
``built``: a function of (context) that returns a core.protocols.RewardFn.
``group``: a function of (context) that returns a core.protocols.GroupRewardFn.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grader:
    """One grader: its kind, its function (``module:name`` in this package), and what it needs.

    ``packages`` come with ``extra``. ``boxable`` allows the prefix ``boxed_``; ``boxed`` is the function to
    use then, where it is not enough to pass only the box's content.
    """

    kind: GraderKind
    address: str
    packages: tuple[str, ...] = ()
    extra: str = "graders"
    needs_label: bool = True
    boxable: bool = True
    boxed: str | None = None


BOXED = "boxed_"
RANDOM = "random"
_MATH_VERIFY = ("math_verify",)
_LINGUISTIC = ("langdetect", "syllapy")
GRADERS: Mapping[str, Grader] = MappingProxyType(
    {
        "exact": Grader(kind="inline", address="text:exact"),
        "contains": Grader(kind="inline", address="text:contains"),
        "int": Grader(kind="inline", address="text:last_int"),
        "last_int": Grader(kind="inline", address="text:last_int"),
        "math": Grader(kind="math", address="math:extract_sides", boxed="math:extract_sides", packages=_MATH_VERIFY),
        "math_exact": Grader(kind="inline", address="math:grade", boxed="math:grade"),
        "deepscaler": Grader(
            kind="math",
            address="math:extract_sides_after_thinking",
            boxed="math:extract_sides_after_thinking",
            packages=_MATH_VERIFY,
        ),
        "gemma_math": Grader(
            kind="math",
            address="math:extract_sides_after_channel",
            boxed="math:extract_sides_after_channel",
            packages=_MATH_VERIFY,
        ),
        "dapo": Grader(kind="inline", address="dapo:grade", boxed="dapo:grade_boxed"),
        "gsm8k": Grader(kind="inline", address="gsm8k:grade"),
        "gpqa": Grader(kind="inline", address="gpqa:grade", needs_label=False),
        "f1": Grader(kind="inline", address="text:f1"),
        "regex": Grader(kind="worker", address="text:regex"),
        "json_schema": Grader(kind="worker", address="schema:grade", packages=("jsonschema",), needs_label=False),
        "ifbench": Grader(kind="inline", address="ifeval.registry:grade", packages=_LINGUISTIC, needs_label=False),
        "ifeval": Grader(kind="inline", address="ifeval.registry:grade", packages=_LINGUISTIC, needs_label=False),
        "code": Grader(kind="built", address="adapter:build_code_reward", needs_label=False, boxable=False),
        "reasoning_gym": Grader(
            kind="worker", address="reasoning_gym:grade", packages=("reasoning_gym",), needs_label=False
        ),
        "lm_eval": Grader(
            kind="built",
            address="lm_eval:build_lm_eval_reward",
            packages=("lm_eval",),
            extra="lm-eval",
            needs_label=False,
            boxable=False,
        ),
        "remote_rm": Grader(kind="built", address="remote:build_remote_reward", packages=("httpx",), needs_label=False),
        "reward_model": Grader(
            kind="built", address="remote:build_model_reward", packages=("httpx",), needs_label=False
        ),
        "llm_judge": Grader(
            kind="group", address="judge:build_judge_reward", packages=("httpx",), needs_label=False, boxable=False
        ),
        RANDOM: Grader(kind="built", address="adapter:build_random_reward", needs_label=False, boxable=False),
        "deterministic_random": Grader(kind="inline", address="text:deterministic_random", needs_label=False),
    }
)


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One reward of a mixture and its weight."""

    name: str
    weight: float

    @property
    def grader(self) -> Grader:
        """Its registry entry, with or without ``boxed_``."""
        return GRADERS[self.name] if self.name in GRADERS else GRADERS[self.name.removeprefix(BOXED)]

    @property
    def is_boxed(self) -> bool:
        """Whether only the boxed answer is graded."""
        return self.name not in GRADERS


def parse_rm_type(rm_type: str) -> tuple[RewardTerm, ...]:
    """Parse a value of ``--rm-type``: one reward, or several as in ``math:0.9+json_schema:0.1``.

    >>> parse_rm_type("math"), parse_rm_type("boxed_int:2+f1")[1]
    ((RewardTerm(name='math', weight=1.0),), RewardTerm(name='f1', weight=1.0))
    """
    parts = tuple(_part(rm_type, text.strip()) for text in rm_type.split("+"))
    names = [part.name for part in parts]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--rm-type {rm_type} names {min(twice)} twice; give it one weight.")
    return parts


def is_group_rm(rm_type: str) -> bool:
    """Whether a term compares all trajectories of a prompt."""
    return any(part.grader.kind == "group" for part in parse_rm_type(rm_type))


def check_rm_type(rm_type: str) -> None:
    """Reject an unknown name, with a hint, and one whose packages are not installed."""
    for part in parse_rm_type(rm_type):
        missing = [package for package in part.grader.packages if importlib.util.find_spec(package) is None]
        if missing:
            instead = ", or use math_exact, which compares notation and rational values" * (part.grader.kind == "math")
            raise UsageError(
                f"--rm-type {part.name} needs the package {missing[0].replace('_', '-')}; "
                f"install it with pip install 'miles-rl[{part.grader.extra}]'{instead}."
            )


def _part(rm_type: str, text: str) -> RewardTerm:
    name, colon, weight = text.partition(":")
    try:
        part = RewardTerm(name, float(weight) if colon else 1.0)
    except ValueError as error:
        raise UsageError(f"--rm-type {rm_type}: the weight of {name} is {weight!r}, which is not a number.") from error
    if not math.isfinite(part.weight):
        raise UsageError(f"--rm-type {rm_type}: the weight of {name} must be finite.")
    _check_known(name)
    return part


def _check_known(name: str) -> None:
    inner = name.removeprefix(BOXED)
    if name in GRADERS or (inner in GRADERS and GRADERS[inner].boxable):
        return
    close = difflib.get_close_matches(inner, GRADERS, n=1)
    hint = f"did you mean {close[0]}?" if close else "or bring your own with --custom-rm-path."
    raise UsageError(f"--rm-type {name} is not a built-in reward; there are {', '.join(GRADERS)}; {hint}")
