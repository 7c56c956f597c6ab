"""Recipe files: TOML and YAML with includes, loaded as layers of values.

``include = "base.toml"`` (or a list) names files that come before this one, relative to it. The table ``[recipe]`` says
what a recipe is for and sets no option.
"""

import os.path
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from miles.config.value_types import InvalidValue, ValueType
from miles.core.errors import UsageError

SUFFIXES = (".toml", ".yaml", ".yml")
ABOUT = "recipe"
"""The table that describes a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The values of one file under the name the user gave; included files are layers of their own.

    Relative paths start at ``folder``, by default the file's own. ``about`` is its table ``[recipe]``.
    """

    label: str
    values: Mapping[str, Any]
    folder: str | None = None
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])


def read_layers(path: str) -> tuple[Layer, ...]:
    """The file and everything it includes, in the order in which later wins; raises all problems at once."""
    problems: list[str] = []
    layers = _collect_layers(os.path.normpath(path), (), problems)
    if problems:
        raise UsageError(problems)
    return tuple(layers)


def _collect_layers(label: str, above: tuple[str, ...], problems: list[str]) -> list[Layer]:
    if label in above:
        chain = " -> ".join((*above[above.index(label) :], label))
        problems.append(f"{above[-1]} includes {label}, which includes it in turn ({chain}); remove one include.")
        return []
    if (values := _load(label, above[-1] if above else None, problems)) is None:
        return []
    try:
        included = _parse_includes(values.pop("include", []))
    except InvalidValue as error:
        problems.append(f"{label}: include {error}.")
        included = ()
    about = values.pop(ABOUT, {})
    if not isinstance(about, dict):
        problems.append(f"{label}: {ABOUT} describes the recipe; make it a table, [{ABOUT}].")
        about = {}
    layers: list[Layer] = []
    for name in included:
        inner = os.path.normpath(os.path.join(os.path.dirname(label), os.path.expanduser(name)))
        layers += _collect_layers(inner, (*above, label), problems)
    return [*layers, Layer(label=label, values=values, about=cast(dict[str, Any], about))]


def _parse_includes(value: Any) -> Sequence[str]:
    return ValueType(scalar=str, many=True).from_file([value] if isinstance(value, str) else value)


def _load(label: str, parent: str | None, problems: list[str]) -> dict[str, Any] | None:
    """The file as a mapping, or None and a problem."""
    subject = f"{parent} includes {label}, which" if parent else label
    path = Path(label)
    if path.suffix not in SUFFIXES:
        problems.append(f"{subject} is not a recipe: a recipe is a .toml, .yaml or .yml file.")
        return None
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else _load_yaml(text)
    except FileNotFoundError:
        problems.append(f"{subject} does not exist.")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        problems.append(f"{subject} cannot be read: {reason}.")
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        problems.append(f"{subject} is not valid {kind}: {str(error).rstrip('.')}.")
    else:
        if isinstance(values, dict) and all(isinstance(key, str) for key in cast(dict[Any, Any], values)):
            return cast(dict[str, Any], values)
        problems.append(f"{subject} must hold keys and values, like lr: 1e-6.")
    return None


def _load_yaml(text: str) -> Any:
    """``yaml.safe_load``, but a key written twice is refused instead of the last one winning."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [loader.construct_object(key) for key, _ in node.value if key.tag != merge]
        duplicates = [key for i, key in enumerate(keys) if key in keys[:i]]
        if duplicates:
            raise ValueError(f"{duplicates[0]} is written twice (at line {node.start_mark.line + 1} and after)")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        values = yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or "it cannot be parsed"
        raise ValueError(problem + (f" (at line {mark.line + 1}, column {mark.column + 1})" if mark else "")) from error
    return {} if values is None else values
