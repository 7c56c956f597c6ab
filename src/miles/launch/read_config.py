"""Read the config of a command: parse recipe and flags, apply rules, build the plan, report all problems at once."""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from miles.config.cli import index_flags, parse, split_argv
from miles.config.files import SUFFIXES, Layer, read_layers
from miles.config.provenance import Origins, ParseResult
from miles.config.schema import Dataclass, get_options
from miles.config.value_types import InvalidValue
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.eval_config import read_eval_config
from miles.launch.hook_arguments import extract_hook_arguments, find_file_option
from miles.launch.upstream.table import explain_unknown_flag

if TYPE_CHECKING:
    from miles.launch.plan.plan import Plan
    from miles.launch.rules.check import Command
    from miles.launch.upstream.rewrite import LaunchContext

Options = TypeVar("Options", bound=Dataclass)

_TRAINING_PROMPTS = 256
"""How many training prompts of each entry are evaluated where a run has no held-out set."""


def read(command: Command, argv: Sequence[str], *, weights: bool = True) -> tuple[Config, Plan, Origins]:
    """The config of a command, its plan and the origin of every value; raises UsageError with every problem.

    Models and data named by their place on the hub are downloaded; without ``weights`` only a model's config and
    tokenizer are, and the plan lists the rest.
    """
    # Rules and plans import the model families, for which --help should not wait.
    from miles.launch.hub.resolve import NameResolver, read_pins
    from miles.launch.plan.plan import build_plan, choose_run_dir
    from miles.launch.rules.check import check_rules

    recipe, flags = _split_recipe(command, argv)
    problems: list[str] = []
    layers = ()
    try:
        layers = read_layers(recipe) if recipe is not None else ()
    except UsageError as error:
        problems += error.problems
    recipe_was_read = not problems
    overrides: list[Layer] = []
    try:
        flags, overrides = extract_hook_arguments(flags, layers, always=command in ("train", "eval", "open"))
        sets = find_file_option(flags, [*layers, *overrides], "eval_config")
        overrides += [read_eval_config(sets)] if sets is not None else []
    except InvalidValue:
        pass  # parsing reports it
    except UsageError as error:
        raise UsageError([*problems, *error.problems]) from error
    result = _parse_launch_line(flags, layers, overrides)
    problems += result.problems
    names = NameResolver(weights=weights and command != "plan")
    if recipe_was_read and result.config is not None:
        names.pins = read_pins(choose_run_dir(result.config))
        result = replace(result, config=names.resolve(result.config), invalid=result.invalid | names.invalid)
        problems += names.problems
        problems += check_rules(result, command)
    if problems or result.config is None:
        raise UsageError(list(dict.fromkeys(problems)))
    plan = replace(build_plan(result.config), downloads=tuple(names.downloads.values()))
    return result.config, plan, result.origins


def read_without_rules(argv: Sequence[str]) -> Config:
    """A config that need not be complete."""
    return _get_config(_parse_launch_line(argv, ()))


def read_partially(argv: Sequence[str]) -> Config:
    """The config as far as the flags can be parsed; ``read`` reports what is wrong with the others."""
    config = _parse_launch_line(argv, ()).config
    assert config is not None, "every option has a default"
    return config


def _parse_launch_line(
    argv: Sequence[str], layers: Sequence[Layer], overrides: Sequence[Layer] = ()
) -> ParseResult[Config]:
    """Parse ``overrides`` over flags of ours and of upstream over ``layers``; add what upstream's flags imply."""
    from miles.launch.upstream.implied import list_implied_options
    from miles.launch.upstream.rewrite import rewrite_argv

    argv = rewrite_argv(argv, index_flags(get_options(Config)), _read_context(argv, layers))
    result = parse(Config, argv, layers, explain_unknown_flag, overrides)
    implied = list_implied_options(result)
    return parse(Config, argv, (*implied, *layers), explain_unknown_flag, overrides) if implied else result


_CONTEXT_FLAGS = (
    "--rollout-backend",
    "--train-backend",
    "--hf-checkpoint",
    "--model-impl",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--expert-tensor-parallel-size",
)


def _read_context(argv: Sequence[str], layers: Sequence[Layer]) -> LaunchContext:
    """The options on which the meaning of upstream's flags depends."""
    from miles.launch.upstream.implied import list_implied_options
    from miles.launch.upstream.rewrite import LaunchContext, find_model

    flags = split_argv(argv)[1]
    words = [word for args in flags if args.flag in _CONTEXT_FLAGS for word in (args.flag, *args.words)]
    config = parse(Config, words, layers).config
    assert config is not None, "every option has a default"
    checkpoint = config.models.hf_checkpoint
    names = [args.words[0] for args in flags if args.flag == "--model-name" and args.words]
    if checkpoint is None and names:
        words += ["--hf-checkpoint", find_model(names[-1])]
    config = parse(Config, words, (*list_implied_options(parse(Config, words, layers)), *layers)).config
    assert config is not None, "every option has a default"
    return LaunchContext(
        uses_sglang=config.sglang.rollout_backend == "sglang",
        uses_megatron=config.train.train_backend == "megatron",
        checkpoint=checkpoint,
    )


def read_options(root: type[Options], argv: Sequence[str]) -> Options:
    """The options of a command that has its own."""
    return _get_config(parse(root, argv))


def _get_config(result: ParseResult[Options]) -> Options:
    if result.problems or result.config is None:
        raise UsageError(result.problems)
    return result.config


def _split_recipe(command: Command, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, if the first word is one, and the flags; eval and chat also take a checkpoint's or run's folder."""
    if not argv or not split_argv(argv[:1])[0]:
        return None, list(argv)
    first, flags = argv[0], list(argv[1:])
    if command in ("eval", "chat") and not first.endswith(SUFFIXES):
        return _split_folder(first, flags)
    return first, flags


def find_run(folder: Path) -> Path | None:
    """The directory of the run that ``folder`` is, or whose checkpoint it is."""
    candidates = (folder, folder.parent.parent if folder.parent.name == "checkpoints" else folder)
    return next((run for run in candidates if (run / "config.toml").is_file()), None)


def _split_folder(folder: str, flags: list[str]) -> tuple[str | None, list[str]]:
    """The recipe of the run that a folder belongs to, and flags that name its checkpoint and what flags replace."""
    from miles.launch.rules.paths import find_newest_checkpoint

    given = {args.flag for args in split_argv(flags)[1]}
    if "--hf-checkpoint" in given:
        raise UsageError(f"{folder} and --hf-checkpoint both name a checkpoint; keep one.")
    flags = ["--hf-checkpoint", str(find_newest_checkpoint(Path(folder)) or folder), *flags]
    run = find_run(Path(folder))
    if run is None:
        return None, flags
    # A checkpoint has its adapters merged into its weights, and the latest weights of every policy.
    return str(run / "config.toml"), [
        "--lora-rank",
        "0",
        "--no-lora-adapter-path",
        *_replace_options(run, given),
        *flags,
    ]


def _replace_options(run: Path, given: Container[str]) -> list[str]:
    """Flags for options of a run that mean something else without training, or that ``given`` flags replace."""
    values = {name: value for layer in read_layers(str(run / "config.toml")) for name, value in _flatten(layer.values)}
    words: list[str] = []
    for flag, other in (("--rm-type", "custom_rm_path"), ("--custom-rm-path", "rm_type")):
        if flag in given and other in values:
            words.append(f"--no-{other.replace('_', '-')}")
    if "policies" in values and "--policies" not in given:
        tables = json.loads(values["policies"]) if isinstance(values["policies"], str) else values["policies"]
        own = {
            name: {key: value for key, value in table.items() if key != "hf_checkpoint"}
            for name, table in tables.items()
        }
        words += ["--policies", json.dumps(own)] if own else []
    if not values.get("eval_prompt_data") and "--eval-prompt-data" not in given:
        words += _name_training_prompts(values.get("prompt_data", ()))
    return words


def _flatten(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield from value.items() if isinstance(value, dict) else ((name, value),)


def _name_training_prompts(entries: Sequence[str]) -> list[str]:
    """The first training prompts as held-out sets, for a run that has none of its own."""
    from miles.rollout.data.paths import parse_entry

    words: list[str] = []
    for number, entry in enumerate(entries, 1):
        path = entry if parse_entry(entry).weight is None else entry.rpartition("*")[0]
        sliced = path if path.endswith("]") else f"{path}@[:{_TRAINING_PROMPTS}]"
        words += ["train" if number == 1 else f"train-{number}", sliced]
    return ["--eval-prompt-data", *words] if words else []
