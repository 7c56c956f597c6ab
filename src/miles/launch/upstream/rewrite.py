"""Rewriting of upstream's launch lines: words of upstream become words of ours before they are parsed.

A flag that maps to an option becomes that option's flag. One that changes no option becomes ``--upstream-<name>``, so
that the config records it and ``verify`` compares it. A flag of Megatron becomes ``--megatron-<name>`` where Megatron
trains. All others stay as they are.
"""

import os
from collections.abc import Collection, Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from miles.config.cli import FlagArgs, is_flag, split_argv
from miles.launch.upstream.table import RECORDED, UpstreamFlag, find_upstream_flag
from miles.rollout.data.paths import parse_entry

PREFIX = "--upstream-"
_MEGATRON = "--megatron-"
_CONVERTED = ("_torch_dist", "_mcore", "_megatron")
"""Ends of the names of folders that upstream's conversion of a Hugging Face checkpoint writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchContext:
    """What the meaning of a flag depends on: the backends, and the checkpoint as far as it is named."""

    uses_sglang: bool
    uses_megatron: bool
    checkpoint: str | None


def rewrite_argv(argv: Sequence[str], known: Container[str], context: LaunchContext) -> list[str]:
    """The words of a launch line with upstream's flags replaced; ``known`` are the flags of options here."""
    positionals, flags = split_argv(argv)
    given = {args.flag for args in flags}
    names = {Path(path).name.lower() for path in (context.checkpoint, *_get_words(flags, "--model-name")) if path}
    words = list(positionals)
    for args in flags:
        row = None if args.flag in known else find_upstream_flag(args.flag)
        new = _rewrite_own(args, names) if row is None else _rewrite(args, row, context, given)
        words += _join(new)
    return words


def _rewrite(args: FlagArgs, row: UpstreamFlag, context: LaunchContext, given: Collection[str]) -> FlagArgs:
    if args.flag == "--model-name" and context.checkpoint is None and args.words:
        return FlagArgs(flag="--hf-checkpoint", words=(find_model(args.words[0]), *args.words[1:]))
    if row.kind == "map" or (row.kind == "engine" and not context.uses_sglang):
        flag, *value = row.text.split()
        # The option's own flag is more specific; a value that asks for a missing feature is refused later.
        if flag in given or (row.feature and not row.accepts(args.words)):
            return _record(args)
        return FlagArgs(flag=flag, words=tuple(value) if value else row.rename(args.words))
    if row.kind in ("pass", "router") and context.uses_megatron:
        return FlagArgs(flag=_MEGATRON + args.flag[2:], words=args.words)
    return _record(args) if row.kind in RECORDED else args


def _get_words(flags: Sequence[FlagArgs], flag: str) -> Iterator[str]:
    return (word for args in flags if args.flag == flag for word in args.words)


def _rewrite_own(args: FlagArgs, names: Container[str]) -> FlagArgs:
    """An option here of which upstream takes more values; ``names`` are those of the checkpoint."""
    if args.flag == "--eval-prompt-data" and len(args.words) == 1:
        path = args.words[0]
        return FlagArgs(flag=args.flag, words=(Path(parse_entry(path).path).stem or path, path))
    if args.flag == "--loss-mask-type" and args.words[:1] and args.words[0].startswith(("qwen", "distill_qwen")):
        return _record(args)
    if args.flag in ("--ref-load", "--load") and len(args.words) == 1:
        return _record(args) if _is_converted(args.words[0], names) else args
    return args


def _is_converted(path: str, names: Container[str]) -> bool:
    """Whether a folder is, or was to be, upstream's conversion of the checkpoint, which is not needed here."""
    name = Path(path).name.lower()
    return any(name.endswith(end) and name.removesuffix(end) in names for end in _CONVERTED)


def find_model(name: str) -> str:
    """The folder of a model by its name: one here, or one in the cache of Hugging Face; else the name itself."""
    if Path(name).is_dir():
        return name
    home = os.environ.get("HF_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub"))
    wanted = name.replace("/", "--").lower()
    for folder in sorted(cache.glob("models--*")) if cache.is_dir() else ():
        if folder.name.lower() == f"models--{wanted}" or folder.name.lower().endswith(f"--{wanted}"):
            main = folder / "refs" / "main"
            revisions = [main.read_text(encoding="utf-8").strip()] if main.is_file() else []
            revisions += sorted(each.name for each in (folder / "snapshots").glob("*"))
            found = (folder / "snapshots" / revision for revision in revisions)
            if (snapshot := next((each for each in found if (each / "config.json").is_file()), None)) is not None:
                return str(snapshot)
    return name


def _record(args: FlagArgs) -> FlagArgs:
    return FlagArgs(flag=PREFIX + args.flag[2:], words=args.words)


def _join(args: FlagArgs) -> list[str]:
    if len(args.words) == 1 and is_flag(args.words[0]):  # it was given as --flag=--word
        return [f"{args.flag}={args.words[0]}"]
    return [args.flag, *args.words]
