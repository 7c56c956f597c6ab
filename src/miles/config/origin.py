"""Who set what: values gathered layer by layer, each with its origin, into one frozen config.

Origins are "default", a file as the user named it ("recipes/small.toml"), or "flag".
"""

import json
import os.path
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from miles.config.table import Dataclass, Knob, knobs_of, mail_of, rooms_of

Origins = Mapping[str, str]
Explain = Callable[[str], str | None]
C = TypeVar("C", bound=Dataclass)

DEFAULT = "default"
FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading(Generic[C]):
    """A config as far as it could be read.

    ``origins`` go by knob name. ``unread`` names the knobs whose value is not known because of a
    problem: they stand at their default, and nothing should be concluded from them. ``config`` is
    None only when a knob without a default could not be read.
    """

    config: C | None
    origins: Origins
    problems: tuple[str, ...]
    unread: frozenset[str]


class Ledger(Generic[C]):
    """Values gathered so far. Whoever writes later wins; what is wrong is noted, never raised."""

    def __init__(self, root: type[C]) -> None:
        self.root = root
        self.knobs: Mapping[str, Knob] = knobs_of(root)
        self.mail: dict[str, list[str]] = {prefix: [] for prefix in mail_of(root)}
        self.problems: list[str] = []
        self.unread: set[str] = set()
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def put(self, name: str, value: Any, origin: str) -> None:
        """Set a knob."""
        self._values[name], self._origins[name] = value, origin

    def refuse(self, problem: str, name: str | None = None) -> None:
        """Note a problem, and the knob (if one can be told) that stays unread because of it."""
        self.problems.append(problem)
        if name is not None:
            self.unread.add(name)

    def settle(self) -> Reading[C]:
        """Build the config from what was gathered."""
        for knob in self.knobs.values():
            if knob.required and knob.name not in self._values and knob.name not in self.unread:
                self.refuse(f"{knob.flag} is required: {knob.help.rstrip('.')}.", knob.name)
        origins = {name: self._origins.get(name, DEFAULT) for name in self.knobs}
        complete = all(k.name in self._values for k in self.knobs.values() if k.required)
        return Reading(
            config=self._build() if complete else None,
            origins=origins,
            problems=tuple(self.problems),
            unread=frozenset(self.unread),
        )

    def _build(self) -> C:
        given: dict[str, dict[str, Any]] = {room: {} for room in rooms_of(self.root)}
        for name, value in self._values.items():
            given[self.knobs[name].room][name] = value
        for prefix, (room, field) in mail_of(self.root).items():
            given[room][field] = tuple(self.mail[prefix])
        return self.root(**{room: cls(**given[room]) for room, cls in rooms_of(self.root).items()})


def values_of(config: Dataclass) -> dict[str, Any]:
    """Every knob's value by its name."""
    return {knob.name: getattr(getattr(config, knob.room), knob.name) for knob in knobs_of(type(config)).values()}


def to_toml(config: Dataclass, origins: Origins) -> str:
    """The whole config as a recipe that reads back as itself, each value with its origin as a comment.

    Relative paths are written absolute, since a recipe's paths are relative to where it lies.
    """
    values = values_of(config)
    lines: list[str] = []
    for room in rooms_of(type(config)):
        lines += ["", f"[{room}]"] if lines else [f"[{room}]"]
        for knob in knobs_of(type(config)).values():
            if knob.room == room:
                origin = " ".join(origins[knob.name].split())
                lines.append(f"{_assignment(knob, values[knob.name])}  # {origin}")
    return "\n".join(lines) + "\n"


def anchored(knob: Knob, value: Any, folder: str) -> Any:
    """A path-like value with relative paths taken from ``folder``; other values as they are."""
    if not knob.path or value is None:
        return value

    def anchor(path: str) -> str:
        if path.startswith(tuple(f"{scheme}:" for scheme in knob.schemes)):
            return path
        whole = os.path.join(folder, os.path.expanduser(path))
        return os.path.normpath(whole) if folder else whole

    if isinstance(value, str):
        return anchor(value)
    if isinstance(value, dict):  # what is no table of tables is refused later, with a better sentence
        return {name: _anchored_within(table, knob.inner, anchor) for name, table in value.items()}
    every = 2 if knob.path == "pairs" else 1
    return tuple(anchor(item) if i % every == every - 1 else item for i, item in enumerate(value))


def _anchored_within(table: Any, keys: Collection[str], anchor: Callable[[str], str]) -> Any:
    if not isinstance(table, dict):
        return table
    return {key: anchor(v) if key in keys and isinstance(v, str) else v for key, v in table.items()}


def _assignment(knob: Knob, value: Any) -> str:
    if value is None:
        return f"# {knob.name} is unset"
    return f"{knob.name} = {_toml(anchored(knob, value, os.getcwd()))}"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, dict):
        return _toml(json.dumps(value, ensure_ascii=False))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)
