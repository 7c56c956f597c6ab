"""The ``miles`` command: read what was asked, refuse all that is wrong at once, hand over to the command.

Nothing heavy is imported here: each command imports what it needs when it is called.
"""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from miles import __version__
from miles.config.cli import chunks_of, parse
from miles.config.files import SUFFIXES, read_layers
from miles.config.help import help_of, screen_width
from miles.config.origin import Origins
from miles.config.table import Dataclass
from miles.core.errors import MilesError, UsageError
from miles.kernels import arithmetic
from miles.launch import supervise
from miles.launch.config import (
    Config,
    DemoConfig,
    DoctorRoot,
    EnginesRoot,
    ParityRoot,
    ReplayRoot,
    RouteRoot,
    ServeRoot,
    ShowRoot,
)
from miles.launch.ranges import out_of_range
from miles.launch.retired import explain

if TYPE_CHECKING:
    from miles.launch.plan import Plan
    from miles.launch.rules import Command

Options = TypeVar("Options", bound=Dataclass)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 2 for bad input, 1 for another failure, 130 when interrupted."""
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return code
    except UsageError as error:
        for problem in error.problems:
            print(f"miles: {problem}", file=sys.stderr)
        return 2
    except MilesError as error:
        print(f"miles: {error}", file=sys.stderr)
        return supervise.code_of(error)
    except KeyboardInterrupt:
        print("miles: interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `miles plan ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def read(command: Command, argv: Sequence[str]) -> tuple[Config, Plan, Origins]:
    """What a command is to do, or a UsageError with everything that is wrong."""
    # Rules and plans know the families of models, for which nobody who asks for help should wait.
    from miles.launch.plan import plan_of
    from miles.launch.rules import broken

    recipe, rest = _positional(command, argv)
    problems: list[str] = []
    layers = ()
    try:
        layers = read_layers(recipe) if recipe is not None else ()
    except UsageError as error:
        problems += error.problems
    reading = parse(Config, rest, layers, explain)
    recipe_was_read = not problems
    problems += reading.problems
    if recipe_was_read:
        problems += broken(reading, command)
    if problems or reading.config is None:
        raise UsageError(list(dict.fromkeys(problems)))
    return reading.config, plan_of(reading.config), reading.origins


def _positional(command: Command, argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """The recipe, if the first word is one, and the rest; eval and chat also take a checkpoint's or a run's folder."""
    if not argv or not chunks_of(argv[:1])[0]:
        return None, list(argv)
    first, rest = argv[0], list(argv[1:])
    if command in ("eval", "chat") and not first.endswith(SUFFIXES):
        from miles.launch.found import newest_checkpoint

        folder = newest_checkpoint(Path(first)) or first
        return None, ["--hf-checkpoint", str(folder), *rest]
    return first, rest


def _train(argv: list[str]) -> int:
    config, plan, origins = read("train", argv)
    faults = config.faults
    if faults.max_restarts and not supervise.supervised():
        most, patience = faults.max_restarts, faults.heartbeat_timeout
        return supervise.supervise(argv, plan.run_dir, most=most, patience=patience)
    supervise.show_life()
    from miles.launch.run import train

    return train(config, plan, origins)


def _plan(argv: list[str]) -> int:
    json = "--json" in argv
    argv = [word for word in argv if word != "--json"]
    if argv and chunks_of(argv[:1])[0] and not argv[0].endswith(SUFFIXES):
        return _needs(argv[0], argv[1:], json=json)
    config, plan, origins = read("plan", argv)
    from miles.launch.show import as_json, as_text

    with arithmetic.using(config.models.parity):  # what is remembered of a token may depend on it
        print((as_json if json else as_text)(config, plan, origins))
    return 0


def _needs(model: str, argv: list[str], *, json: bool) -> int:
    """What a model takes, whether or not it is here; of the flags those count that change it."""
    reading = parse(Config, argv, (), explain)
    problems = [*reading.problems]
    if reading.config is not None:
        problems += [sentence for _, sentence in out_of_range(reading.config, reading.origins)]
    if problems or reading.config is None:
        raise UsageError(problems)
    from miles.launch import needs

    found = needs.needs_of(model, reading.config)
    print((needs.as_json if json else needs.as_text)(found))
    return 0


def _eval(argv: list[str]) -> int:
    config, plan, origins = read("eval", argv)
    from miles.launch.evaluate import evaluate

    return evaluate(config, plan, origins)


def _chat(argv: list[str]) -> int:
    config, plan, origins = read("chat", argv)
    from miles.launch.chat import chat

    return chat(config, plan, origins)


def _demo(argv: list[str]) -> int:
    options = _options(DemoConfig, argv).demo
    from miles.launch.demo import demo

    return demo(options)


def _serve(argv: list[str]) -> int:
    from miles.launch.serve import read, serve

    return serve(read(argv))


def _route(argv: list[str]) -> int:
    options = _options(RouteRoot, argv).route
    from miles.launch.route import route

    return route(options)


def _doctor(argv: list[str]) -> int:
    loose, _ = chunks_of(argv)
    if len(loose) > 1:
        raise UsageError(f"miles doctor takes one model folder, but was given {len(loose)}: {' '.join(loose)}.")
    options = _options(DoctorRoot, argv[len(loose) :]).doctor
    from miles.launch.doctor import doctor

    return doctor(Path(loose[0]) if loose else None, kernels=options.kernels)


def _show(argv: list[str]) -> int:
    run, rest = _run_of("show", argv, words=1)
    options = _options(ShowRoot, rest).show
    from miles.launch.showing import show

    return show(Path(run[0]), options)


def _engines(argv: list[str]) -> int:
    run, rest = _run_of("engines", argv, words=1)
    options = _options(EnginesRoot, rest).engines
    from miles.launch.asking import engines

    return engines(Path(run[0]), options)


def _replay(argv: list[str]) -> int:
    (run, step), rest = _run_of("replay", argv, words=2)
    options = _options(ReplayRoot, rest).replay
    if not step.isdecimal():
        raise UsageError(f"miles replay takes the number of a step behind the run, not {step}.")
    config, _, _ = read("train", [str(Path(run) / "config.toml")])
    from miles.launch.replay import replay

    return replay(config, Path(run), int(step), options)


def _parity(argv: list[str]) -> int:
    loose, _ = chunks_of(argv)
    if len(loose) != 1:
        raise UsageError(f"miles parity takes one model or run before its flags, but was given {len(loose)}.")
    options = _options(ParityRoot, argv[1:]).compared
    from miles.launch.parity import parity

    return parity(loose[0], options)


def _run_of(command: str, argv: list[str], *, words: int) -> tuple[list[str], list[str]]:
    """The words before the flags, the first of which is a run; and the rest."""
    loose, _ = chunks_of(argv)
    if len(loose) != words:
        raise UsageError(f"It is miles {command} {COMMANDS[command].usage}; {len(loose)} words stand before the flags.")
    if not (Path(loose[0]) / "config.toml").is_file():
        raise UsageError(f"{loose[0]} is not a run; name the directory a run was saved to.")
    return loose, argv[words:]


def _options(root: type[Options], argv: list[str]) -> Options:
    """The options of a command that has its own, or a UsageError with all that is wrong."""
    reading = parse(root, argv)
    problems = [*reading.problems]
    if reading.config is not None:
        problems += [sentence for _, sentence in out_of_range(reading.config, reading.origins)]
    if problems or reading.config is None:
        raise UsageError(problems)
    return reading.config


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    usage: str
    help: str
    run: Callable[[list[str]], int]
    root: type[Dataclass] | None
    more: str = ""


_RECIPE = (
    "A recipe is a .toml or .yaml file of the same names (lr = 1e-6), flat or in the sections below; "
    'include = "other.toml" puts another before it. Later wins: default, included file, recipe, flag. '
    "--no-<flag> turns a switch off or unsets a value."
)
_MODEL = (
    "Instead of a recipe, a model may be given (a folder, a config.json, or the name of a published one such as "
    "Qwen3-30B-A3B): what it needs is printed from its config alone. "
)
_FOLDER = "Instead of a recipe, the folder of a checkpoint or of a run may be given. "
COMMANDS: dict[str, _Command] = {
    "train": _Command(usage="[RECIPE] [--flags]", help="Train a model.", run=_train, root=Config, more=_RECIPE),
    "plan": _Command(
        usage="[RECIPE | MODEL] [--flags] [--json]",
        help="Print every knob with its origin, the batch identity, the memory plan and the placement.",
        run=_plan,
        root=Config,
        more=_MODEL + _RECIPE,
    ),
    "demo": _Command(
        usage="[--flags]", help="Watch a small model learn on this machine, in minutes.", run=_demo, root=DemoConfig
    ),
    "doctor": _Command(
        usage="[MODEL] [--kernels]",
        help="Say what this machine can run and what it is missing, and whether MODEL fits.",
        run=_doctor,
        root=DoctorRoot,
        more="MODEL is the folder of a Hugging Face checkpoint.",
    ),
    "eval": _Command(
        usage="[RECIPE | FOLDER] [--flags]",
        help="Score a checkpoint on held-out prompts.",
        run=_eval,
        root=Config,
        more=_FOLDER + _RECIPE,
    ),
    "chat": _Command(
        usage="[RECIPE | FOLDER] [--flags]",
        help="Talk to a checkpoint.",
        run=_chat,
        root=Config,
        more=_FOLDER + _RECIPE,
    ),
    "show": _Command(
        usage="RUN [--flags]",
        help="Print trajectories of a run, each token coloured by its log-prob.",
        run=_show,
        root=ShowRoot,
        more="RUN is the directory of a run; --no-color prints plain text.",
    ),
    "engines": _Command(
        usage="RUN [--add ADDRESS ...] [--add-servers N] [--remove ENGINE ...]",
        help="List the engines of a run that goes on, and have some join or leave.",
        run=_engines,
        root=EnginesRoot,
    ),
    "replay": _Command(
        usage="RUN STEP [--flags]",
        help="Make a step of a run again and compare it to the bit: tokens, log-probs, metrics, weights.",
        run=_replay,
        root=ReplayRoot,
        more="RUN is the directory of a run. The exit code is 0 where all is equal and 1 where anything differs.",
    ),
    "serve": _Command(
        usage="MODEL [--flags]",
        help="Serve a checkpoint over HTTP: SGLang's API and OpenAI's.",
        run=_serve,
        root=ServeRoot,
        more="MODEL is the folder of a Hugging Face checkpoint, or of a run, whose newest checkpoint is served.",
    ),
    "parity": _Command(
        usage="MODEL [--a BACKEND] [--b BACKEND] [--flags]",
        help="Say which operation two backends first differ in on the same tokens, and by how much.",
        run=_parity,
        root=ParityRoot,
        more="MODEL is the folder of a Hugging Face checkpoint, or of a run, whose newest checkpoint is read.",
    ),
    "route": _Command(
        usage="--engine-urls URL ... [--flags]",
        help="Give several engines one address: by load or by prefix, with health checks and retries.",
        run=_route,
        root=RouteRoot,
    ),
}


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(_overview(), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("--help", "-h", "help") and not (rest and rest[0] in COMMANDS):
        print(_overview())
    elif name in ("--version", "-V"):
        print(f"miles {__version__}")
    elif name == "help":
        print(_help(rest[0]))
    elif name not in COMMANDS:
        raise UsageError(_no_such_command(name))
    elif "--help" in rest or "-h" in rest:
        print(_help(name))
    else:
        return COMMANDS[name].run(rest)
    return 0


def _no_such_command(name: str) -> str:
    if name.endswith(SUFFIXES):
        return f"{name} is a recipe; write miles train {name}."
    if name.startswith("-"):
        return f"{name} comes after a command, as in miles train {name}; the commands are {', '.join(COMMANDS)}."
    close = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
    return f"{name} is not a command; {hint}"


def _overview() -> str:
    lines = [f"  {name.ljust(8)} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Miles post-trains language models with reinforcement learning.",
            "",
            "usage: miles COMMAND ...",
            "",
            *lines,
            "",
            "miles COMMAND --help tells more of each; miles --version tells which version this is.",
        ]
    )


def _help(name: str) -> str:
    command = COMMANDS[name]
    parts = [f"usage: miles {name} {command.usage}", command.help, textwrap.fill(command.more, screen_width())]
    if command.root is not None:
        parts.append(help_of(command.root))
    return "\n\n".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
