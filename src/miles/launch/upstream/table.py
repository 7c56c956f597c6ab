"""Table of upstream's flags: what each one is here, and the names of options in other frameworks.

``flags.tsv`` has a row for every flag of upstream, of one of the kinds below (``--wandb-*`` is a row for all flags of
that prefix); ``synonyms.tsv`` has the names of TRL, verl and others.

    used     an option here, under the same name
    map      another option here: its flag, or its flag and a value; ``a=b`` among the values renames a value
    engine   a flag of SGLang: an option of the native engine, passed on under --rollout-backend sglang; another value
             than those listed is refused where the row names a feature
    served   a flag of SGLang: no effect on the native engine, passed on under --rollout-backend sglang
    pass     a flag of Megatron: passed on under --train-backend megatron, and no effect elsewhere
    router   load balancing of routers: passed on under --train-backend megatron; elsewhere another value than those
             listed, or a flag without a value, is refused
    shape    restates config.json of the checkpoint, and is compared with it
    exact    how Megatron computes: what is computed here is at least that exact
    design   what a run does anyway
    fresh    what --load should leave out: nothing where a run starts fresh
    noted    no effect here
    use      not a flag here: what to use instead
    missing  a feature that is not supported
    other    an option of Ray or of a launch script, not of train.py
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, cast

Kind = Literal[
    "used",
    "map",
    "engine",
    "served",
    "pass",
    "router",
    "shape",
    "exact",
    "design",
    "fresh",
    "noted",
    "use",
    "missing",
    "other",
]
RECORDED: tuple[Kind, ...] = ("pass", "router", "shape", "exact", "design", "fresh", "noted")
"""Kinds of flags that change no option; the config records them."""


@dataclass(frozen=True, slots=True)
class UpstreamFlag:
    """A row: ``values`` are those that are accepted (all if empty); another one asks for ``feature``."""

    kind: Kind
    text: str = ""
    values: tuple[str, ...] = ()
    feature: str = ""

    def accepts(self, words: tuple[str, ...]) -> bool:
        """Whether the value is one of ``values``, before they are renamed; numbers are compared as numbers."""
        names = (value.partition("=")[0] for value in self.values)
        return not self.values or not words or any(_is_same(words[0], name) for name in names)

    def rename(self, words: tuple[str, ...]) -> tuple[str, ...]:
        """The words under the names that values have here."""
        names = dict(value.split("=", 1) for value in self.values if "=" in value)
        return tuple(names.get(word, word) for word in words)


def _is_same(word: str, value: str) -> bool:
    try:
        return float(word) == float(value)
    except ValueError:
        return word == value


@cache
def load_upstream_flags() -> dict[str, UpstreamFlag]:
    """Every row by its flag."""
    rows = {}
    for flag, kind, *rest in _read_table("flags.tsv"):
        text, values, feature = (*rest, "", "", "")[:3]
        accepted = tuple(value for value in values.split("|") if value)
        rows[flag] = UpstreamFlag(cast(Kind, kind), text, accepted, feature)
    return rows


@cache
def load_flag_synonyms() -> dict[str, str]:
    """The name of an option in another framework -> our flag."""
    return {row[0]: row[1] for row in _read_table("synonyms.tsv")}


def find_upstream_flag(flag: str) -> UpstreamFlag | None:
    """The row of a flag, or of its prefix."""
    rows = load_upstream_flags()
    if (row := rows.get(flag)) is not None:
        return row
    return next((row for name, row in rows.items() if name.endswith("*") and flag.startswith(name[:-1])), None)


def explain_unknown_flag(flag: str) -> str | None:
    """The end of a sentence that starts with a flag that cannot be used as it is; None where nothing is known of it."""
    row = load_upstream_flags().get(flag)
    if row is None or row.kind == "other":
        synonym = _find_synonym(flag)
        if synonym is not None:
            return f"is called {synonym} here"
        row = find_upstream_flag(flag)
    match row:
        case None | UpstreamFlag(kind="used" | "other" | "engine" | "served"):
            return None
        case UpstreamFlag(kind="missing"):
            return describe_missing(row.text)
        case UpstreamFlag(kind="use"):
            return f"is not a flag here; {row.text}"
        case UpstreamFlag(kind="map"):
            return f"is called {row.text} here"
        case _:  # of a file, since words of the command line are rewritten
            return "is a flag of upstream; give it on the command line"


def describe_missing(feature: str) -> str:
    """The end of a sentence about a feature; what follows a semicolon is advice.

    >>> describe_missing("training in FP8")
    'asks for training in FP8, which is not supported'
    """
    return "asks for {}, which is not supported{}{}".format(*feature.partition(";"))


def _read_table(name: str) -> list[list[str]]:
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return [line.split("\t") for line in lines if not line.startswith("#")]


def _find_synonym(flag: str) -> str | None:
    """By its name, or the end of a dotted one such as ``actor_rollout_ref.actor.optim.lr``."""
    name = flag.lstrip("-").replace("-", "_").lower()
    while name:
        if (ours := load_flag_synonyms().get(name)) is not None:
            return ours
        name = name.partition(".")[2]
    return None
