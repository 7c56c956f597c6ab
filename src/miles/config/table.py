"""The table of all knobs of a root config: a dataclass with one field a room, each a dataclass of knobs."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Protocol, get_type_hints

from miles.config.kind import Kind, kind_of


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One knob as the outside sees it: the room that owns it, its names, kind, default and help."""

    room: str
    name: str
    kind: Kind
    default: Any
    required: bool
    help: str
    off: str | None
    aliases: tuple[str, ...]
    unit: str | None
    path: bool | str
    schemes: tuple[str, ...]
    inner: tuple[str, ...] = ()

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return flag_of(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that makes it false, or absent, or an empty list; None when it has no such state."""
        switchable = self.kind.scalar is bool or self.kind.optional or self.kind.many
        return "--no-" + self.flag[2:] if switchable else None

    @property
    def absent(self) -> Any:
        """What ``negation`` sets."""
        if self.kind.scalar is bool:
            return False
        return None if self.kind.optional else ()


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


@cache
def rooms_of(root: type[Dataclass]) -> Mapping[str, type[Dataclass]]:
    """The rooms of a root config, in order."""
    hints = get_type_hints(root)
    return {f.name: hints[f.name] for f in fields(root)}


@cache
def knobs_of(root: type[Dataclass]) -> Mapping[str, Knob]:
    """Every knob of every room by its name; names are unique, so sections in files are optional."""
    table: dict[str, Knob] = {}
    for room, cls in rooms_of(root).items():
        for knob in _knobs(room, cls):
            assert knob.name not in table, f"{knob.name} is a knob of both {table[knob.name].room} and {room}"
            assert knob.name not in rooms_of(root), f"{knob.name} is a knob and a room"
            table[knob.name] = knob
    return table


def mail_of(root: type[Dataclass]) -> Mapping[str, tuple[str, str]]:
    """Prefix -> (room, field) of every mailbox, longest prefix first."""
    boxes = {
        f.metadata["mail"]: (room, f.name)
        for room, cls in rooms_of(root).items()
        for f in fields(cls)
        if "mail" in f.metadata
    }
    return dict(sorted(boxes.items(), key=lambda item: -len(item[0])))


def _knobs(room: str, cls: type[Dataclass]) -> Iterator[Knob]:
    hints = get_type_hints(cls)
    for f in fields(cls):
        if "mail" in f.metadata:
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        yield Knob(
            room=room,
            name=f.name,
            kind=kind_of(hints[f.name]),
            default=None if default is MISSING else default,
            required=default is MISSING,
            help=f.metadata.get("help", ""),
            off=f.metadata.get("off"),
            aliases=f.metadata.get("aliases", ()),
            unit=f.metadata.get("unit"),
            path=f.metadata.get("path", False),
            schemes=f.metadata.get("schemes", ()),
            inner=f.metadata.get("inner", ()),
        )
