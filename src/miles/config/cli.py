"""Command-line and recipe parser: a frozen config, the origin of each value, and everything that is wrong.

Flags are flat (``--eps-clip 0.2``); files may be flat or in sections (``[algo] eps_clip = 0.2``). Later wins: default,
included file, file, flag, repeated flag. Problems are collected and never exit the process, so that a user sees all of
them at once.

argv is split at flags: a flag and the words up to the next one are parsed by themselves. So one bad flag hides no
other, and ``-1e-5`` is a number everywhere.
"""

import os.path
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from miles.config.files import Layer
from miles.config.provenance import FLAG, ConfigBuilder, Explain, ParseResult, resolve_paths
from miles.config.schema import Dataclass, Option, flag_from_name, get_sections
from miles.config.value_types import InvalidValue, ValueType

C = TypeVar("C", bound=Dataclass)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagArgs:
    """A flag and the words that follow it."""

    flag: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join((self.flag, *self.words))


def parse(
    root: type[C],
    argv: Sequence[str],
    layers: Sequence[Layer] = (),
    explain: Explain = lambda flag: None,
    overrides: Sequence[Layer] = (),
) -> ParseResult[C]:
    """Parse ``overrides`` over ``argv`` over ``layers`` over defaults.

    ``explain`` is called with flags and keys that no section has; it may return the end of a sentence that starts with
    the flag.
    """
    builder = ConfigBuilder(root)
    for layer in layers:
        _parse_layer(builder, layer, explain)
    _parse_flags(builder, argv, explain)
    for layer in overrides:
        _parse_layer(builder, layer, explain)
    return builder.build()


def is_flag(word: str) -> bool:
    """Whether a word of a command line is a flag; a negative number is a value."""
    if not word.startswith("-") or word == "-":
        return False
    try:
        float(word)
    except ValueError:
        return word.startswith("--") or word[1:2].isalpha()
    return False


def split_argv(argv: Sequence[str]) -> tuple[list[str], list[FlagArgs]]:
    """The words before the first flag, and every flag with its words."""
    positionals: list[str] = []
    flags: list[FlagArgs] = []
    for word in argv:
        if is_flag(word):
            flag, equals, value = word.partition("=")
            flags.append(FlagArgs(flag=flag, words=(value,) if equals else ()))
        elif flags:
            flags[-1] = FlagArgs(flag=flags[-1].flag, words=(*flags[-1].words, word))
        else:
            positionals.append(word)
    return positionals, flags


# -- flags ----------------------------------------------------------------------------------


def _parse_flags(builder: ConfigBuilder[Any], argv: Sequence[str], explain: Explain) -> None:
    known = index_flags(builder.options)
    positionals, flags = split_argv(argv)
    for word in positionals:
        _handle_positional(builder, word, known, explain)
    for args in flags:
        if args.flag not in known:
            _handle_unknown_flag(builder, args, known, explain)
            continue
        option = known[args.flag]
        try:
            value = resolve_paths(option, _parse_flag_value(option, args), "")
        except InvalidValue as error:
            builder.add_problem(_end_sentence(f"{args.flag} {error}"), option.name)
            continue
        builder.set(option.name, value, FLAG)


def index_flags(options: Mapping[str, Option]) -> dict[str, Option]:
    """Options by every flag that sets them: their own, aliases, presets, the ``--no-`` form, and ``off``."""
    known: dict[str, Option] = {}
    for option in options.values():
        for flag in (option.negation, option.off, *option.aliases, *option.presets, option.flag):
            if flag is not None:
                owner = known.setdefault(flag, option)
                assert owner is option, f"{flag} is a flag of both {owner.name} and {option.name}"
    return known


def _parse_flag_value(option: Option, args: FlagArgs) -> Any:
    fixed: dict[str | None, Any] = {
        **option.presets,
        **dict.fromkeys((option.negation, option.off), option.negated_value),
    }
    if args.flag in fixed:
        if args.words:
            raise InvalidValue(f"takes no value, but was given {args.words[0]!r}")
        return fixed[args.flag]
    if option.secret and args.words == ("",):  # a shell variable that is unset
        return None
    return option.value_type.from_words(args.words)


def _handle_unknown_flag(
    builder: ConfigBuilder[Any], args: FlagArgs, known: Mapping[str, Option], explain: Explain
) -> None:
    """Pass it through to another program, or record why it is not a flag."""
    prefix = next((p for p in builder.passthrough if args.flag.startswith(f"--{p}-")), None)
    if explanation := explain(args.flag):
        builder.add_problem(f"{args.flag} {explanation}.")
    elif prefix is not None:
        builder.extend_passthrough(prefix, ["--" + args.flag[len(prefix) + 3 :], *args.words])
    else:
        close = suggest_name(args.flag, known)
        hint = f"; did you mean {close}?" if close else "; see --help all."
        builder.add_problem(f"{args.flag} is not a flag{hint}", known[close].name if close else None)


def _handle_positional(builder: ConfigBuilder[Any], word: str, known: Mapping[str, Option], explain: Explain) -> None:
    """A word before the first flag; ``name=value``, as in Hydra, is explained by its name."""
    name, equals, _ = word.partition("=")
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    explanation = explain(f"--{name}") or (f"is called {flag} here" if flag in known else None)
    if equals and explanation:
        builder.add_problem(f"{name} {explanation}; options are flags, as in --lr 1e-6.")
    else:
        builder.add_problem(f"{word!r} is not expected here: values follow their flag, as in --lr 1e-6.")


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """The name that was probably meant: spelled almost like ``name``, or the only one that begins or ends with it.

    >>> suggest_name("--max-response-len", ["--rollout-max-response-len", "--eps-clip"])
    '--rollout-max-response-len'
    >>> suggest_name("--use-mlflow", ["--use-kl-loss"]) is None
    True
    """
    stems = {one.strip("-").replace("_", "-").lower(): one for one in known}
    wanted = name.strip("-").replace("_", "-").lower()
    if close := get_close_matches(wanted, stems, n=1, cutoff=0.75 if len(wanted) < 8 else 0.8):
        return stems[close[0]]
    if (switched := stems.get(wanted.removeprefix("no-"))) is not None:
        return switched
    longer = [stem for stem in stems if stem.startswith(f"{wanted}-") or stem.endswith(f"-{wanted}")]
    return stems[longer[0]] if len(longer) == 1 else None


# -- files ----------------------------------------------------------------------------------


def _parse_layer(builder: ConfigBuilder[Any], layer: Layer, explain: Explain) -> None:
    folder = os.path.dirname(layer.label) if layer.folder is None else layer.folder
    seen = set[str]()
    for section, key, value in _iter_entries(builder, layer):
        option = builder.options.get(key)
        if option is None and (prefix := builder.find_passthrough(key)) is not None:
            _parse_passthrough(builder, layer.label, key, prefix, value)
        elif option is None:
            _handle_unknown_key(builder, layer.label, key, explain)
        elif section is not None and section != option.section:
            builder.add_problem(f"{layer.label}: {key} belongs in [{option.section}], not in [{section}].", key)
        elif key in seen:
            place = f"at the top and in [{option.section}]"
            builder.add_problem(f"{layer.label}: {key} is set twice, {place}; keep one.", key)
        else:
            seen.add(key)
            try:
                value = resolve_paths(option, option.value_type.from_file(value), folder)
                builder.set(key, value, layer.label)
            except InvalidValue as error:
                builder.add_problem(_end_sentence(f"{layer.label}: {key} {error}"), key)


def _parse_passthrough(builder: ConfigBuilder[Any], label: str, key: str, prefix: str, value: Any) -> None:
    """Flags of another program in a file: a list of words, before those of the command line."""
    try:
        builder.extend_passthrough(prefix, ValueType(scalar=str, many=True).from_file(value))
    except InvalidValue as error:
        builder.add_problem(_end_sentence(f"{label}: {key} {error}"))


def _iter_entries(builder: ConfigBuilder[Any], layer: Layer) -> Iterator[tuple[str | None, str, Any]]:
    """(section, key, value) of every key; unknown sections are recorded as problems."""
    sections = get_sections(builder.root)
    for key, value in layer.values.items():
        if key in sections and isinstance(value, dict):
            yield from ((key, str(inner), inner_value) for inner, inner_value in value.items())
        elif key in builder.options:
            yield None, key, value
        elif key in sections:
            builder.add_problem(f"{layer.label}: {key} is a section and holds keys of its own, as in [{key}].")
        elif isinstance(value, dict):
            close = get_close_matches(key, [*sections, *builder.options], n=1)
            every = ", ".join(f"[{section}]" for section in sections)
            hint = f"did you mean [{close[0]}]?" if close else f"there are {every}."
            builder.add_problem(f"{layer.label}: there is no section [{key}]; {hint}")
            builder.invalid.update(str(inner) for inner in value if inner in builder.options)
        else:
            yield None, key, value


def _handle_unknown_key(builder: ConfigBuilder[Any], label: str, key: str, explain: Explain) -> None:
    option = index_flags(builder.options).get(flag_from_name(key))
    if option is not None:
        value = "false" if option.value_type.scalar is bool and option.flag != flag_from_name(key) else "..."
        builder.add_problem(f"{label}: {key} is not a key; write {option.name} = {value} instead.", option.name)
    elif explanation := explain(flag_from_name(key)):
        builder.add_problem(f"{label}: {key} {explanation}.")
    else:
        close = suggest_name(key, builder.options)
        hint = f"; did you mean {close}?" if close else "; see miles train --help all."
        builder.add_problem(f"{label}: {key} is not a key{hint}", close)


def _end_sentence(text: str) -> str:
    return text if text.endswith("?") else f"{text}."
