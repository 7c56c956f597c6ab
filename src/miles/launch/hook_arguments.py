"""Arguments of user hooks: flags declared with ``add_arguments(parser)``, and the keys of --custom-config-path.

Both are attributes of the ``args`` that functions with upstream signatures get, beside the run's options. They are one
option of the config, ``hook_arguments``, so that a resumed run has the same.
"""

from __future__ import annotations

import json
from argparse import ArgumentError, ArgumentParser
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from miles.config.cli import FlagArgs, index_flags, split_argv
from miles.config.files import Layer, read_layers
from miles.config.schema import get_options, get_sections
from miles.core.errors import HookError, UsageError
from miles.hooks.import_path import find_object, is_path
from miles.hooks.registry import HOOK_POINTS, HookPoint
from miles.launch.config import Config

OPTION = "hook_arguments"
_CUSTOM_CONFIG = "custom_config_path"


def extract_hook_arguments(
    flags: Sequence[str], layers: Sequence[Layer], *, always: bool
) -> tuple[list[str], list[Layer]]:
    """The flags that no hook declares, and layers that win over flags: --custom-config-path and the hooks' arguments.

    Hooks are imported only if a flag is unknown, or ``always``. Raises UsageError with every problem.
    """
    problems: list[str] = []
    custom = _read_custom_config(flags, layers)
    known, unknown_keys = _split_keys(custom)
    values: dict[str, Any] = dict(_find_value(flags, layers, OPTION) or {})
    rest = list(flags)
    parser = _HookParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    if always or _has_unknown_flags(flags):
        for source, declare in _iter_declarations(flags, [*layers, *known]):
            try:
                declare(_Declarations(parser))
            except Exception as error:  # whatever a user's function raises
                problems.append(f"{source}: add_arguments fails with {type(error).__name__}: {error}.")
        rest, declared = _parse_declared(parser, flags, problems)
        values = parser.get_defaults() | values | declared
    values |= unknown_keys
    problems += _check_json(values)
    if problems:
        raise UsageError(problems)
    label = custom[-1].label if custom else "hooks"
    return rest, [*known, *([Layer(label=label, values={OPTION: values})] if values else [])]


class _HookParser(ArgumentParser):
    """A parser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(None, message)

    def get_defaults(self) -> dict[str, Any]:
        return {action.dest: action.default for action in self._actions}

    def get_flags(self) -> set[str]:
        return {flag for action in self._actions for flag in action.option_strings}

    def get_names(self, flags: Collection[str]) -> set[str]:
        """The attributes that ``flags`` set."""
        return {action.dest for action in self._actions if not {*flags}.isdisjoint(action.option_strings)}


class _Declarations:
    """The parser as hooks see it: groups are the parser itself, and options of the run stay the run's."""

    def __init__(self, parser: ArgumentParser) -> None:
        self._parser = parser

    def add_argument(self, *names: str, **kwargs: Any) -> Any:
        options = index_flags(get_options(Config))
        own = [name for name in names if name not in options]
        return self._parser.add_argument(*own, **kwargs) if own else None

    def add_argument_group(self, *args: Any, **kwargs: Any) -> _Declarations:
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)


def _read_custom_config(flags: Sequence[str], layers: Sequence[Layer]) -> tuple[Layer, ...]:
    path = find_file_option(flags, layers, _CUSTOM_CONFIG)
    return tuple(replace(layer, folder="") for layer in read_layers(path)) if path is not None else ()


def find_file_option(flags: Sequence[str], layers: Sequence[Layer], name: str) -> str | None:
    """The file that an option names; None also where a run's own config.toml has what is in it already."""
    resolved = [layer for layer in layers if get_sections(Config).keys() <= layer.values.keys()]
    return _find_value(flags, [layer for layer in layers if layer not in resolved], name)


def _split_keys(custom: Sequence[Layer]) -> tuple[list[Layer], dict[str, Any]]:
    """Options of the run, as layers, and all other keys."""
    options = get_options(Config)
    known = [
        replace(layer, values={key: value for key, value in layer.values.items() if key in options}) for layer in custom
    ]
    others = {key: value for layer in custom for key, value in layer.values.items() if key not in options}
    return known, others


def _find_value(flags: Sequence[str], layers: Sequence[Layer], name: str) -> Any:
    """The value of an option before the config is parsed: that of the last flag, else of the last file."""
    option = get_options(Config)[name]
    given = [args.words for args in split_argv(flags)[1] if args.flag == option.flag and args.words]
    if given:
        return option.value_type.from_words(given[-1])
    found = [value for layer in layers for value in _lookup(layer.values, option.section, name)]
    return option.value_type.from_file(found[-1]) if found else None


def _lookup(values: Mapping[str, Any], section: str, name: str) -> Iterator[Any]:
    inner = values.get(section)
    for table in (values, inner if isinstance(inner, dict) else {}):
        if name in table:
            yield table[name]


def _has_unknown_flags(flags: Sequence[str]) -> bool:
    known = index_flags(get_options(Config))
    return any(args.flag not in known for args in split_argv(flags)[1])


def _iter_declarations(flags: Sequence[str], layers: Sequence[Layer]) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """``add_arguments`` of every hook that has one, as its attribute or beside it in its module."""
    seen: set[int] = set()
    for point in {point.option: point for point in HOOK_POINTS}.values():
        path = _find_value(flags, layers, point.option)
        declare = _find_declaration(point, path) if isinstance(path, str) else None
        if declare is not None and id(declare) not in seen:
            seen.add(id(declare))
            yield f"{point.flag} {path}", declare


def _find_declaration(point: HookPoint, path: str) -> Callable[[Any], Any] | None:
    if point.is_builtin(path) or point.resolve_name(path) in point.runtime_names or not is_path(path):
        return None
    try:
        hook = find_object(path, flag=point.flag)
        beside = path.rpartition(":" if ":" in path else ".")[0] + ":add_arguments"
        declare = getattr(hook, "add_arguments", None) or find_object(beside, flag=point.flag)
    except HookError:  # it has none, or cannot be imported, which is reported when it is loaded
        return None
    return declare if callable(declare) else None


def _parse_declared(parser: _HookParser, flags: Sequence[str], problems: list[str]) -> tuple[list[str], dict[str, Any]]:
    """The flags that are not declared, and the values of those that are given."""
    positionals, given = split_argv(flags)
    declared = parser.get_flags()
    rest = [*positionals, *(word for args in given if args.flag not in declared for word in (args.flag, *args.words))]
    own = [args for args in given if args.flag in declared]
    try:
        parsed = vars(parser.parse_args([word for args in own for word in (args.flag, *args.words)]))
    except ArgumentError as error:
        problems.append(f"{_name_flag(error, own)} {error.message}, as the hook that declares it says.")
        return rest, {}
    return rest, {name: parsed[name] for name in parser.get_names([args.flag for args in own])}


def _name_flag(error: ArgumentError, own: Sequence[FlagArgs]) -> str:
    return error.argument_name or " ".join(args.flag for args in own)


def _check_json(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            yield (
                f"{name}, an argument of a hook, is a {type(value).__name__}, which cannot be written to the run's "
                "config; give numbers, texts, lists or tables."
            )
