"""Schema of a root config: a dataclass with one field per section, each section a dataclass of options."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import cache
from typing import Any, ClassVar, Literal, Protocol, get_type_hints

from miles.config.value_types import NumberRange, ValueType, value_type_from_annotation


class Dataclass(Protocol):
    """Any dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option: its section, names, value type, default and help."""

    section: str
    name: str
    value_type: ValueType
    default: Any
    required: bool
    help: str
    off: str | None
    aliases: tuple[str, ...]
    unit: str | None
    path: bool | str
    schemes: tuple[str, ...]
    range: NumberRange
    inner: tuple[str, ...]
    text: bool
    hub: Literal["model", "dataset"] | None
    secret: bool
    presets: Mapping[str, Any]

    @property
    def flag(self) -> str:
        """The flag that sets it."""
        return flag_from_name(self.name)

    @property
    def negation(self) -> str | None:
        """The flag that sets it to false, None or an empty list; None when it has no such value."""
        switchable = self.value_type.scalar is bool or self.value_type.optional or self.value_type.many
        return "--no-" + self.flag[2:] if switchable else None

    @property
    def negated_value(self) -> Any:
        """The value that ``negation`` sets."""
        if self.value_type.scalar is bool:
            return False
        return None if self.value_type.optional else ()

    def check_range(self, value: Any) -> None:
        """Raise InvalidValue when a number of ``value`` is outside the option's range."""
        if self.value_type.scalar in (int, float) and value is not None:
            for number in value if self.value_type.many else (value,):
                self.range.check(number)


def flag_from_name(name: str) -> str:
    return "--" + name.replace("_", "-")


@cache
def get_sections(root: type[Dataclass]) -> Mapping[str, type[Dataclass]]:
    """The sections of a root config, in order."""
    hints = get_type_hints(root)
    return {f.name: hints[f.name] for f in fields(root)}


@cache
def get_options(root: type[Dataclass]) -> Mapping[str, Option]:
    """Every option of every section by name; names are unique, so sections in files are optional."""
    options: dict[str, Option] = {}
    for section, cls in get_sections(root).items():
        for option in _section_options(section, cls):
            name = option.name
            assert name not in options, f"{name} is an option of both {options[name].section} and {section}"
            # A section may have an option of its own name ([elastic] elastic = true).
            assert name == section or name not in get_sections(root), f"{name} is an option and a section"
            options[name] = option
    return options


def get_passthroughs(root: type[Dataclass]) -> Mapping[str, tuple[str, str]]:
    """Prefix -> (section, field) of every passthrough, longest prefix first."""
    found = {
        f.metadata["passthrough"]: (section, f.name)
        for section, cls in get_sections(root).items()
        for f in fields(cls)
        if "passthrough" in f.metadata
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def _section_options(section: str, cls: type[Dataclass]) -> Iterator[Option]:
    hints = get_type_hints(cls)
    for f in fields(cls):
        if "passthrough" in f.metadata:
            continue
        default = f.default_factory() if f.default_factory is not MISSING else f.default
        yield Option(
            section=section,
            name=f.name,
            value_type=value_type_from_annotation(hints[f.name]),
            default=None if default is MISSING else default,
            required=default is MISSING,
            help=f.metadata.get("help", ""),
            off=f.metadata.get("off"),
            aliases=f.metadata.get("aliases", ()),
            unit=f.metadata.get("unit"),
            path=f.metadata.get("path", False),
            schemes=f.metadata.get("schemes", ()),
            range=f.metadata.get("range", NumberRange()),
            inner=f.metadata.get("inner", ()),
            text=f.metadata.get("text", False),
            hub=f.metadata.get("hub"),
            secret=f.metadata.get("secret", False),
            presets=f.metadata.get("presets", {}),
        )
