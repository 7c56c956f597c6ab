"""Help text of a root config: flags by section, the essential ones, or those that contain a word."""

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from miles.config.schema import Dataclass, Option, get_options, get_sections
from miles.config.value_types import format_value

_INDENT = 4
_COLUMN = 34


def format_help(root: type[Dataclass], width: int | None = None) -> str:
    """All flags of ``root``, wrapped to ``width`` (the terminal's when None)."""
    width = width or get_terminal_width()
    return "\n\n".join(_format_section(root, section, cls, width) for section, cls in get_sections(root).items())


def format_essentials(root: type[Dataclass], groups: Mapping[str, Sequence[str]], width: int | None = None) -> str:
    """The options named in ``groups``, under their titles."""
    width, options = width or get_terminal_width(), get_options(root)
    parts = [
        "\n".join([title, *(line for name in names for line in _format_option(options[name], width))])
        for title, names in groups.items()
    ]
    return "\n\n".join(parts)


def search_help(root: type[Dataclass], words: Sequence[str], width: int | None = None) -> str:
    """The flags whose name, aliases or help contain every one of ``words``, by section; a sentence where none does."""
    width = width or get_terminal_width()
    wanted = [word.lower().lstrip("-").replace("_", "-") for word in words]
    parts: list[str] = []
    for section in get_sections(root):
        found = [
            option
            for option in get_options(root).values()
            if option.section == section and all(word in _get_search_text(option) for word in wanted)
        ]
        if found:
            parts.append("\n".join([f"[{section}]", *(line for o in found for line in _format_option(o, width))]))
    return "\n\n".join(parts) or f"No flag has {' and '.join(words)} in its name or description."


def _get_search_text(option: Option) -> str:
    return " ".join((option.flag, *option.aliases, option.off or "", option.help)).lower().replace("_", "-")


def get_terminal_width() -> int:
    """Columns of the terminal, between 60 and 120."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 120))


def _format_section(root: type[Dataclass], section: str, cls: type[Dataclass], width: int) -> str:
    title = (cls.__doc__ or "").split("\n")[0]
    lines = [f"[{section}] {title}"]
    for option in get_options(root).values():
        if option.section == section:
            lines += _format_option(option, width)
    return "\n".join(lines)


def _format_option(option: Option, width: int) -> Iterator[str]:
    head = " " * _INDENT + format_flag(option)
    text = f"{option.help} {_format_default(option)}".strip()
    body = textwrap.wrap(text, width - _COLUMN, break_long_words=False, break_on_hyphens=False)
    if len(head) < _COLUMN - 1:
        yield head.ljust(_COLUMN) + body.pop(0)
    else:
        yield head
    yield from (" " * _COLUMN + line for line in body)


def format_flag(option: Option) -> str:
    """The flag and a placeholder for its value."""
    flags = ", ".join([option.flag, *option.aliases])
    if option.value_type.scalar is bool:
        return flags
    if option.value_type.choices:
        return f"{flags} {{{','.join(map(str, option.value_type.choices))}}}"
    return f"{flags} {_placeholder(option)}" + (" ..." if option.value_type.many else "")


def _placeholder(option: Option) -> str:
    if option.unit:
        return option.unit.upper().replace(" ", "-")
    if option.path:
        return "NAME PATH" if option.path == "pairs" else "PATH"
    return {int: "N", float: "X", str: "TEXT", dict: "JSON"}[option.value_type.scalar]


def _format_default(option: Option) -> str:
    if option.required:
        return "(required)"
    if option.value_type.scalar is bool and option.default is not False:
        return f"(default: {format_value(option.default)}; {option.off or option.negation} turns it off)"
    return f"(default: {format_value(option.default)})"
