"""The help text of a root config: every flag by room, with its sentence, its default and what it counts."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from miles.config.table import Dataclass, Knob, knobs_of, rooms_of

_INDENT = 4
_COLUMN = 34


def help_of(root: type[Dataclass], width: int | None = None) -> str:
    """All flags of ``root``, wrapped to ``width`` (the terminal's when None)."""
    width = width or screen_width()
    return "\n\n".join(_room(root, room, cls, width) for room, cls in rooms_of(root).items())


def screen_width() -> int:
    """Columns to write help in: the terminal's, within reason."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def shown(value: Any) -> str:
    """A value as a user would type it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) if value else "none"
    if isinstance(value, Mapping):
        return str(dict(value)) if value else "none"
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


def _room(root: type[Dataclass], room: str, cls: type[Dataclass], width: int) -> str:
    title = (cls.__doc__ or "").split("\n")[0]
    lines = [f"[{room}] {title}"]
    for knob in knobs_of(root).values():
        if knob.room == room:
            lines += _entry(knob, width)
    return "\n".join(lines)


def _entry(knob: Knob, width: int) -> Iterator[str]:
    head = " " * _INDENT + spelled(knob)
    text = f"{knob.help} {_default(knob)}".strip()
    body = textwrap.wrap(text, width - _COLUMN, break_long_words=False, break_on_hyphens=False)
    if len(head) < _COLUMN - 1:
        yield head.ljust(_COLUMN) + body.pop(0)
    else:
        yield head
    yield from (" " * _COLUMN + line for line in body)


def spelled(knob: Knob) -> str:
    """The flag and a placeholder for its value."""
    flags = ", ".join([knob.flag, *knob.aliases])
    if knob.kind.scalar is bool:
        return flags
    if knob.kind.choices:
        return f"{flags} {{{','.join(map(str, knob.kind.choices))}}}"
    return f"{flags} {_placeholder(knob)}" + (" ..." if knob.kind.many else "")


def _placeholder(knob: Knob) -> str:
    if knob.unit:
        return knob.unit.upper().replace(" ", "-")
    if knob.path:
        return "NAME PATH" if knob.path == "pairs" else "PATH"
    return {int: "N", float: "X", str: "TEXT", dict: "JSON"}[knob.kind.scalar]


def _default(knob: Knob) -> str:
    if knob.required:
        return "(required)"
    if knob.kind.scalar is bool and knob.default is not False:
        return f"(default: {shown(knob.default)}; {knob.off or knob.negation} turns it off)"
    return f"(default: {shown(knob.default)})"
