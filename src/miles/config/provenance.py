"""Provenance of option values: merge values layer by layer, each with its origin, into one frozen config.

An origin is "default", a file as the user named it ("recipes/small.toml"), or "flag".
"""

import json
import os.path
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from miles.config.schema import Dataclass, Option, get_options, get_passthroughs, get_sections
from miles.config.value_types import InvalidValue
from miles.core.hub_names import is_path

Origins = Mapping[str, str]
Explain = Callable[[str], str | None]
C = TypeVar("C", bound=Dataclass)

HIDDEN = "***"
"""What is shown instead of a secret."""
DEFAULT = "default"
FLAG = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParseResult(Generic[C]):
    """A config as far as it could be parsed.

    ``origins`` is by option name. ``invalid`` names the options whose value is unknown because of a problem: they have
    their default here, and nothing should be concluded from it. ``config`` is None only when an option without a
    default could not be parsed.
    """

    config: C | None
    origins: Origins
    problems: tuple[str, ...]
    invalid: frozenset[str]


class ConfigBuilder(Generic[C]):
    """Collects option values; later ones win, and problems are collected instead of raised."""

    def __init__(self, root: type[C]) -> None:
        self.root = root
        self.options: Mapping[str, Option] = get_options(root)
        self.passthrough: dict[str, dict[str, list[str]]] = {prefix: {} for prefix in get_passthroughs(root)}
        self.problems: list[str] = []
        self.invalid: set[str] = set()
        self._values: dict[str, Any] = {}
        self._origins: dict[str, str] = {}

    def set(self, name: str, value: Any, origin: str) -> None:
        """Set an option; a secret is refused from a file, which is copied and shared."""
        if self.options[name].secret and origin != FLAG and value is not None:
            self.add_problem(f"{origin} has {name}, a secret, which does not belong in a file; remove it.", name)
            return
        self._values[name] = value
        self._origins[name] = origin

    def add_problem(self, problem: str, name: str | None = None) -> None:
        """Record a problem, and the option (where known) whose value it makes unknown."""
        self.problems.append(problem)
        if name is not None:
            self.invalid.add(name)

    def find_passthrough(self, key: str) -> str | None:
        """The prefix of the passthrough whose field is this key of a file."""
        return next((prefix for prefix, (_, field) in get_passthroughs(self.root).items() if field == key), None)

    def extend_passthrough(self, prefix: str, words: Sequence[str]) -> None:
        """Add flags of another program; of a flag given twice the last one counts."""
        flags, flag = self.passthrough[prefix], ""
        for word in words:
            if word.startswith("--"):
                flag = word.partition("=")[0]
                flags.pop(flag, None)
            flags.setdefault(flag, []).append(word)

    def build(self) -> ParseResult[C]:
        """Build the config from the values set so far."""
        for option in self.options.values():
            if option.required and option.name not in self._values and option.name not in self.invalid:
                self.add_problem(f"{option.flag} is required: {option.help.rstrip('.')}.", option.name)
        self._check_ranges()
        complete = all(option.name in self._values for option in self.options.values() if option.required)
        return ParseResult(
            config=self._build_config() if complete else None,
            origins={name: self._origins.get(name, DEFAULT) for name in self.options},
            problems=tuple(self.problems),
            invalid=frozenset(self.invalid),
        )

    def _check_ranges(self) -> None:
        for name in (name for name in self.options if name in self._values):
            option, origin = self.options[name], self._origins[name]
            try:
                option.check_range(self._values[name])
            except InvalidValue as error:
                where = "" if origin == FLAG else f" (from {origin})"
                self.add_problem(f"{option.flag} {error}{where}.", name)

    def _build_config(self) -> C:
        values: dict[str, dict[str, Any]] = {section: {} for section in get_sections(self.root)}
        for name, value in self._values.items():
            values[self.options[name].section][name] = value
        for prefix, (section, field) in get_passthroughs(self.root).items():
            values[section][field] = tuple(word for words in self.passthrough[prefix].values() for word in words)
        return self.root(**{section: cls(**values[section]) for section, cls in get_sections(self.root).items()})


def flatten_values(config: Dataclass) -> dict[str, Any]:
    """Every option's value by name, those of secrets hidden."""
    options = get_options(type(config)).values()
    values = {option.name: getattr(getattr(config, option.section), option.name) for option in options}
    return values | {o.name: HIDDEN for o in options if o.secret and values[o.name] is not None}


def to_toml(config: Dataclass, origins: Origins) -> str:
    """The whole config as a recipe that parses back to itself, each value with its origin as a comment.

    Relative paths are written absolute, since the paths of a recipe are relative to its folder.
    """
    values = flatten_values(config)
    lines: list[str] = []
    for section in get_sections(type(config)):
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        for option in get_options(type(config)).values():
            if option.section == section:
                origin = " ".join(origins[option.name].split())
                lines.append(f"{_format_assignment(option, values[option.name])}  # {origin}")
        lines += _format_passthroughs(config, section)
    return "\n".join(lines) + "\n"


def _format_passthroughs(config: Dataclass, section: str) -> list[str]:
    """The flags of other programs that were given."""
    found = [field for owner, field in get_passthroughs(type(config)).values() if owner == section]
    words = {field: getattr(getattr(config, section), field) for field in found}
    return [f"{field} = {_to_toml_value(value)}" for field, value in words.items() if value]


def resolve_paths(option: Option, value: Any, folder: str) -> Any:
    """The value of a path option with relative paths taken from ``folder``, and the text of a file for ``@file``."""
    if option.text and isinstance(value, str):
        return _read_text(value, folder)
    if not option.path or value is None:
        return value

    def resolve(path: str) -> str:
        if path.startswith(tuple(f"{scheme}:" for scheme in option.schemes)):
            return path
        if option.hub is not None and not is_path(option.hub, path, folder):
            return path
        joined = os.path.join(folder, os.path.expanduser(path))
        return os.path.normpath(joined) if folder else joined

    if isinstance(value, str):
        return resolve(value)
    if isinstance(value, dict):  # a rule refuses what is not a table of tables, with a better message
        return {name: _resolve_table(table, option.inner, resolve) for name, table in value.items()}
    every = 2 if option.path == "pairs" else 1
    return tuple(resolve(item) if i % every == every - 1 else item for i, item in enumerate(value))


def _read_text(value: str, folder: str) -> str:
    """The content of the file for ``@file``, without line ends at its end; ``@@`` begins a text with ``@``."""
    if not value.startswith("@") or value.startswith("@@"):
        return value.removeprefix("@") if value.startswith("@@") else value
    path = os.path.join(folder, os.path.expanduser(value[1:]))
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise InvalidValue(f"{value} names a file that cannot be read: {reason}") from error


def _resolve_table(table: Any, keys: Collection[str], resolve: Callable[[str], str]) -> Any:
    if not isinstance(table, dict):
        return table
    return {key: resolve(v) if key in keys and isinstance(v, str) else v for key, v in table.items()}


def _format_assignment(option: Option, value: Any) -> str:
    if value is None:
        return f"# {option.name} is unset"
    if option.secret:
        return f"# {option.name} is secret and not written"
    if option.text:
        return f"{option.name} = {_to_toml_value('@' + value if value.startswith('@') else value)}"
    return f"{option.name} = {_to_toml_value(resolve_paths(option, value, os.getcwd()))}"


def _to_toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_to_toml_value(item) for item in value)}]"
    if isinstance(value, dict):
        return _to_toml_value(json.dumps(value, ensure_ascii=False))
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")
    return repr(value)
