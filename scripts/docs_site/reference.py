"""Generated pages of docs/: the commands and flags from the parser, the library from its docstrings.

``pages()`` returns them by path; ``make regenerate`` writes them, and a test compares them with what is checked in.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path
from types import FunctionType
from typing import Any

from scripts.docs_site.drawings import drawings
from scripts.docs_site.families import family_pages

import miles
from miles.api.train import train
from miles.cluster.device_peaks import PEAKS
from miles.config.help import format_flag
from miles.config.schema import Dataclass, Option, get_options, get_passthroughs, get_sections
from miles.config.value_types import format_value
from miles.core import protocols, types
from miles.launch.config import Config
from miles.launch.essential_options import ESSENTIAL_OPTIONS
from miles.launch.main import COMMANDS

DOCS = Path(__file__).parents[2] / "docs"
PEAKS_BEGIN = "<!-- peaks: written by `make regenerate` -->\n"
PEAKS_END = "<!-- end of peaks -->"
FLAG_HEAD = ["| flag | default | meaning |", "|---|---|---|"]
HOOK_TYPES = {
    types: (
        "Version",
        "Author",
        "Span",
        "Status",
        "Prompt",
        "Reward",
        "Trajectory",
        "Group",
        "Sample",
        "Batch",
        "StepReport",
    ),
    protocols: ("SamplingParams", "Completion", "FilterResult", "Engine"),
}
LIBRARY_ORDER = (
    "train",
    "train_async",
    "TrainResult",
    "open",
    "open_async",
    "Policy",
    "Engine",
    "Trainer",
    "PolicySample",
    "Prompt",
    "Reward",
    "MilesError",
    "UsageError",
)


def pages() -> Mapping[str, str]:
    """Every generated file by its path below docs/."""
    return {
        "reference/cli.md": format_commands(),
        "reference/flags.md": format_flags(),
        "reference/api.md": format_library(),
        "reference/types.md": format_types(),
        **family_pages(),
        **drawings(),
        "platforms.md": format_platforms(),
    }


# -- commands and flags ---------------------------------------------------------------------


def escape(text: str) -> str:
    """Text for a cell of a table: pipes, and what Markdown or HTML would take for markup outside of code."""
    parts = re.split(r"(`[^`]*`)", text.replace("\n", " "))
    plain = [part if part.startswith("`") else re.sub(r"([*_<])", r"\\\1", part) for part in parts]
    return "".join(plain).replace("|", "\\|")


def mark_flags(text: str) -> str:
    """Help text with its flags as code."""
    return re.sub(r"(?<![\w`-])(--[a-zA-Z][\w-]*)", r"`\1`", text.replace("--no-<flag>", "--no-NAME"))


def format_default(option: Option) -> str:
    """The default of an option as a cell."""
    if option.required:
        return "required"
    if option.value_type.scalar is bool:
        return f"on; `{option.off or option.negation}`" if option.default else "off"
    return "" if option.default in (None, (), "") else f"`{format_value(option.default)}`"


def format_row(option: Option) -> str:
    flag = format_flag(option).replace("|", "\\|").replace(",", ", ").replace(",  ", ", ")
    return f"| `{flag}` | {format_default(option)} | {escape(mark_flags(option.help))} |"


def flag_table(options: Iterable[Option]) -> list[str]:
    return [*FLAG_HEAD, *(format_row(option) for option in options)]


def format_commands() -> str:
    """The page of the commands: each with its usage; the essential flags; the flags of the small commands."""
    lines = [
        "# Command line",
        "",
        "Every command, the flags of `miles train` that most runs set, and the flags of the other commands. "
        "[All flags](flags.md) of `miles train` are a page of their own. `miles COMMAND --help` prints the same, "
        "`--help all` all flags, `--help WORD` those about a word. This page is generated from the parser.",
        "",
        "| command | |",
        "|---|---|",
        *(f"| `miles {name} {escape_code(command.usage)}` | {escape(command.help)} |" for name, command in commands()),
        "",
        "## Essential flags",
        "",
        "`train`, `plan`, `check`, `eval` and `chat` take the flags of a run. Most runs set these:",
        "",
    ]
    options = get_options(Config)
    for title, names in ESSENTIAL_OPTIONS.items():
        lines += [f"### {title}", "", *flag_table(options[name] for name in names), ""]
    for name, command in commands():
        lines += [f"## miles {name}", "", mark_flags(command.help), ""]
        lines += ["```text", f"miles {name} {command.usage}", "```", ""]
        lines += [escape(mark_flags(command.details)), ""] if command.details else []
        if command.root is Config:
            lines += ["Its flags are those of a run: the essential ones above, and [all](flags.md).", ""]
        elif command.root is not None:
            lines += command_flags(command.root)
    return "\n".join(lines).rstrip() + "\n"


def commands() -> Iterator[tuple[str, Any]]:
    yield from COMMANDS.items()


def escape_code(text: str) -> str:
    """Text inside code in a table."""
    return text.replace("|", "\\|")


def command_flags(root: type[Dataclass]) -> list[str]:
    """The flags of a command's own; those it shares with a run are only named."""
    shared = get_options(Config)
    own = [option for name, option in get_options(root).items() if name not in shared]
    same = [option for name, option in get_options(root).items() if name in shared]
    lines = [*flag_table(own), ""] if own else []
    if same:
        named = ", ".join(f"`{option.flag}`" for option in same)
        lines += [f"As in a run: {named}.", ""]
    return lines


def format_flags() -> str:
    """The page of all flags of a run, by section."""
    options = get_options(Config)
    lines = [
        "# All flags",
        "",
        f"The {len(options)} flags of `miles train`, `plan`, `check`, `eval` and `chat`, by the section a recipe "
        "may put "
        "them in. A flag `--rollout-batch-size 32` is the key `rollout_batch_size = 32` of a recipe and the argument "
        "`rollout_batch_size=32` of `miles.train`. The [essential ones](cli.md#essential-flags) are fewer. Flags of "
        "upstream that are mapped or compared are on [their own page](../upstream_flags.md). This page is generated "
        "from the parser.",
        "",
    ]
    for section, cls in get_sections(Config).items():
        found = [option for option in options.values() if option.section == section]
        if found:
            title = escape(mark_flags((cls.__doc__ or "").split("\n")[0]))
            lines += [f"## {section}", "", title, "", *flag_table(found), ""]
    passed = ", ".join(f"`--{prefix}-*`" for prefix in get_passthroughs(Config))
    lines += [
        "## Passed on",
        "",
        f"Flags with these prefixes go to the backend they name, without the prefix: {passed}.",
    ]
    return "\n".join(lines) + "\n"


def format_platforms() -> str:
    """The page of platforms with the table of peaks as `miles.cluster.platform` has it."""
    before, rest = (DOCS / "platforms.md").read_text(encoding="utf-8").split(PEAKS_BEGIN)
    rows = [f"| {name} | {flops:,} | {bandwidth:,} | {memory} |" for name, flops, bandwidth, _, memory in PEAKS]
    table = ["| product | TFLOP/s | GB/s | GB of memory |", "|---|--:|--:|--:|", *rows]
    return before + PEAKS_BEGIN + "\n" + "\n".join(table) + "\n\n" + PEAKS_END + rest.split(PEAKS_END)[1]


# -- the library ----------------------------------------------------------------------------


def get_export(name: str) -> Any:
    """An exported object; ``miles.train`` is a package that is called as the function."""
    return train if name == "train" else getattr(miles, name)


def format_signature(name: str, function: Any) -> str:
    """A call as code: one line where it fits, else a parameter a line."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.name != "self"]
    returns = signature.return_annotation
    tail = "" if returns in (inspect.Signature.empty, "None", None) else f" -> {returns}"
    words = re.sub(
        r"<factory>", "...", str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    )
    words = re.sub(r"ForwardRef\('([^']*)'\)", r"\1", words)
    words = words.replace("'", "") if not re.search(r"= '", words) else re.sub(r": '([^']*)'", r": \1", words)
    line = f"{name}{words}{str(tail).replace(chr(39), '')}"
    if len(line) <= 100:
        return line
    inner = words[1:-1]
    parts = re.split(r", (?=(?:\*{0,2}\w+:|\*,|\*$|/))", inner)
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){str(tail).replace(chr(39), '')}"


def format_docstring(thing: Any) -> str:
    """A docstring as Markdown: double backquotes are code, and examples are blocks of code."""
    text = re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(thing) or "")
    text = re.sub(r" *# doctest: .*", "", text)
    return re.sub(r"(?m)^((?:>>>|\.\.\.).*(?:\n(?:>>>|\.\.\.|\S).*)*)", r"```pycon\n\1\n```", text)


def list_members(export: type) -> list[tuple[str, Any, bool]]:
    """Public functions and properties of a class without the async forms, each with whether it is a property."""
    found = inspect.getmembers_static(export)
    return [
        (name, member.fget if isinstance(member, property) else member, isinstance(member, property))
        for name, member in found
        if not name.startswith("_") and not name.endswith("_async") and isinstance(member, FunctionType | property)
    ]


def format_library() -> str:
    """The page of what ``import miles`` exports."""
    assert set(LIBRARY_ORDER) == set(miles.__all__), "LIBRARY_ORDER and miles.__all__ differ"
    lines = [
        "# API reference",
        "",
        "What `import miles` exports, generated from its docstrings. [The library](../library.md) explains it with "
        "examples. Every verb of a policy, engine and trainer has an async form of the same signature "
        "(`sample_async`, ...).",
        "",
    ]
    for name in LIBRARY_ORDER:
        export = get_export(name)
        lines += [f"## miles.{name}", ""]
        if not (inspect.isclass(export) and issubclass(export, Exception)):
            lines += ["```py", format_signature(f"miles.{name}", export), "```", ""]
        lines += [format_docstring(export), ""]
        lines += format_members(name, export) if inspect.isclass(export) else []
    return "\n".join(lines).rstrip() + "\n"


def format_members(name: str, cls: type) -> Iterator[str]:
    """The public functions and properties of a class, each under a heading."""
    for member, function, is_property in list_members(cls):
        yield from (f"### {name}.{member}", "")
        if not is_property:
            yield from ("```py", format_signature(member, function), "```", "")
        if function.__doc__:
            yield from (format_docstring(function), "")


def format_types() -> str:
    """The page of the types that hooks get and return."""
    lines = [
        "# Types of hooks",
        "",
        "What [hooks](../hooks.md) get and return: `miles.core.types`, and `miles.core.protocols` from "
        "`SamplingParams` on. All are frozen; `dataclasses.replace` makes a changed copy. This page is generated "
        "from their docstrings.",
        "",
    ]
    for module, names in HOOK_TYPES.items():
        for name in names:
            cls = getattr(module, name)
            lines += [f"## {name}", ""]
            if is_dataclass(cls) or issubclass(cls, tuple):
                lines += ["```py", format_signature(name, cls), "```", ""]
            elif issubclass(cls, Enum):
                lines += ["Values: " + ", ".join(f"`{member.name}`" for member in cls) + ".", ""]
            lines += [format_docstring(cls), "", *(() if issubclass(cls, Enum) else format_members(name, cls))]
    return "\n".join(lines).rstrip() + "\n"
