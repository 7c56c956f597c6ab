"""The ``miles`` command line: dispatch to a command, and turn errors into messages and exit codes.

Nothing heavy is imported here: each command imports what it needs when it is called.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from miles import __version__
from miles.config.cli import split_argv
from miles.config.files import SUFFIXES
from miles.config.help import format_essentials, format_help, get_terminal_width, search_help
from miles.config.schema import Dataclass, get_options
from miles.core.errors import MilesError, UsageError, describe_os_error
from miles.launch.config import (
    AdoptRoot,
    BundleRoot,
    CompareRoot,
    Config,
    ConvertRoot,
    DemoConfig,
    DoctorRoot,
    EnginesRoot,
    InitRoot,
    ParityRoot,
    RecipesRoot,
    ReplayRoot,
    ReportRoot,
    RouteRoot,
    ServeRoot,
    ShowRoot,
    StacksRoot,
    ViewRoot,
)
from miles.launch.essential_options import ESSENTIAL_OPTIONS
from miles.launch.precompile.process import start_precompilation
from miles.launch.read_config import find_run, read, read_options, read_without_rules
from miles.launch.runtime import supervisor
from miles.launch.runtime.gc_tuning import pause_gc
from miles.launch.runtime.signals import StopSignal, exit_code_from_signal
from miles.observe.output import discard_if_lost, drop_output_errors, is_reader_gone, print_error
from miles.observe.start_timer import StartTimer, read_process_age


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status (the table is in docs/run_directory.md)."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its warnings would cut into what is printed here
    try:
        code = _dispatch(list(sys.argv[1:] if argv is None else argv))
        if sys.stdout is not None:  # it is None after >&-
            sys.stdout.flush()
    except (Exception, KeyboardInterrupt) as error:
        status = _report_failure(error)
        if status is None:  # an error of the program
            if argv is not None:
                raise
            sys.excepthook(type(error), error, error.__traceback__)
        code = 1 if status is None else status
    if argv is None:  # the process ends now
        _end_process(code)
    return code


# Seconds that exit functions and threads of user functions may take before the process is ended.
_EXIT_SECONDS = 10.0


def _end_process(code: int) -> None:
    """End the process as multiprocessing ends its children: without taking the interpreter apart.

    That takes seconds with a model loaded, and with CUDA threads it has waited for ever, when no Python thread could
    run any more to end it. What is left is the operating system's to free.
    """
    threading.Thread(target=_exit_later, args=(code,), daemon=True).start()
    if sys.__stderr__ is not None:  # where no Python thread runs, as an exit function holds the interpreter's lock
        faulthandler.dump_traceback_later(2 * _EXIT_SECONDS, file=sys.__stderr__, exit=True)
    try:
        threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            discard_if_lost(stream)
    finally:
        os._exit(code)


def _exit_later(code: int) -> None:
    """End the process with its status even if a thread that a user's function started never ends."""
    time.sleep(_EXIT_SECONDS)
    os._exit(code)


_MEMORY_HINT = (
    "miles plan with the same flags prints the memory plan, and a smaller batch or response length needs less"
)


def _report_failure(error: BaseException) -> int | None:
    """Print the sentence of an error; returns the exit status, or None for an error that has no sentence."""
    match error:
        case UsageError():
            for problem in error.problems:
                print_error(f"miles: {problem}")
            return 2
        case MilesError():
            print_error(f"miles: {error}")
            return supervisor.exit_code_from_error(error)
        case KeyboardInterrupt():
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # another one ends the process without a traceback
            print_error("miles: interrupted.")
            return exit_code_from_signal(error.number if isinstance(error, StopSignal) else signal.SIGINT)
        case BrokenPipeError() if is_reader_gone(sys.stdout):  # as in `miles plan ... | head`
            discard_if_lost(sys.stdout)
            return 0
        case MemoryError():
            print_error(f"miles: the process is out of memory; {_MEMORY_HINT}.")
            return 1
        case RuntimeError() if type(error).__name__ == "OutOfMemoryError":  # torch's, which is not imported here
            print_error(f"miles: the device is out of memory: {error}; {_MEMORY_HINT}.")
            return 1
        case OSError():
            print_error(f"miles: {describe_os_error(error)}.")
            return 1
        case _:
            return None


@contextmanager
def _ignoring_lost_output() -> Iterator[None]:
    """For commands that go on without a reader: lost output changes nothing, and other pipes are the run's own."""
    with drop_output_errors():
        try:
            yield
        except BrokenPipeError as error:
            raise MilesError(f"a pipe to another process of the run was closed ({error})") from error


def _train(argv: list[str]) -> int:
    timer = StartTimer(age=read_process_age())
    config, plan, origins = read("train", argv)
    faults = config.fault_tolerance
    with _ignoring_lost_output():
        if faults.max_restarts and not supervisor.is_supervised():
            return supervisor.supervise(
                argv, plan.run_dir, max_restarts=faults.max_restarts, heartbeat_timeout=faults.heartbeat_timeout
            )
        supervisor.start_supervised_heartbeat()
        timer.lap("config")
        with pause_gc():
            from miles.launch.commands.train import train

        timer.lap("imports")
        precompilation = start_precompilation(config)
        return train(config, plan, origins, timer, precompilation)


def _plan(argv: list[str]) -> int:
    json, every = "--json" in argv, "--all" in argv
    argv = [word for word in argv if word not in ("--json", "--all")]
    argv, gpu = _take_gpu(argv)
    if argv and split_argv(argv[:1])[0] and not argv[0].endswith(SUFFIXES):
        return _plan_model(argv[0], argv[1:], json=json)
    if gpu is not None and not any(word.partition("=")[0] == "--device" for word in argv):
        argv = [*argv, "--device", "cuda"]
    config, plan, origins = read("plan", argv)
    from miles.launch.plan.render import as_json, as_text

    text = as_json(config, plan, origins, gpu=gpu) if json else as_text(config, plan, origins, every=every, gpu=gpu)
    print(text)
    return 0


def _take_gpu(argv: list[str]) -> tuple[list[str], str | None]:
    """The words without --gpu NAME, and the name."""
    if "--gpu" not in argv:
        return argv, None
    at = argv.index("--gpu")
    if argv[at + 1 : at + 2] == [] or argv[at + 1].startswith("-"):
        raise UsageError("--gpu needs the name of a GPU, such as --gpu H200.")
    return [*argv[:at], *argv[at + 2 :]], argv[at + 1]


def _check(argv: list[str]) -> int:
    config, plan, _ = read("train", argv, weights=False)
    from miles.launch.commands.check import check

    return check(config, plan)


def _plan_model(model: str, argv: list[str], *, json: bool) -> int:
    """Print what a model needs, whether or not its weights are here; some flags change it."""
    config = read_without_rules(argv)
    from miles.launch.plan import model_requirements

    requirements = model_requirements.estimate_requirements(model, config)
    print((model_requirements.as_json if json else model_requirements.as_text)(requirements))
    return 0


def _eval(argv: list[str]) -> int:
    config, _, _ = read("eval", argv)
    with pause_gc():
        from miles.launch.commands.evaluate import evaluate

    return evaluate(config, find_run(Path(config.models.hf_checkpoint or ".")))


def _chat(argv: list[str]) -> int:
    config, _, origins = read("chat", argv)
    with pause_gc():
        from miles.launch.commands.chat import chat

    run = find_run(Path(config.models.hf_checkpoint or "."))
    return chat(config, origins, in_run=run is not None)


def _demo(argv: list[str]) -> int:
    options = read_options(DemoConfig, argv).demo
    with pause_gc():
        from miles.launch.commands.demo import demo

    with _ignoring_lost_output():
        return demo(options)


def _serve(argv: list[str]) -> int:
    with pause_gc():
        from miles.launch.commands.serve import read_serve_config, serve

    return serve(read_serve_config(argv))


def _route(argv: list[str]) -> int:
    urls, flags = split_argv(argv)
    if urls and any(args.flag in ("--engine-urls", "--worker-urls") for args in flags):
        raise UsageError(f"{urls[0]} and --engine-urls both name engines; give all of them in one place.")
    words = ["--engine-urls", *urls] if urls else []
    options = read_options(RouteRoot, [*argv[len(urls) :], *words]).route
    from miles.launch.commands.route import route

    return route(options)


def _doctor(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) > 1:
        raise UsageError(f"miles doctor takes one model folder, but was given {len(words)}: {' '.join(words)}.")
    options = read_options(DoctorRoot, argv[len(words) :]).doctor
    from miles.launch.commands.doctor import doctor
    from miles.launch.hub.resolve import resolve_model

    return doctor(Path(resolve_model(words[0])) if words else None, kernels=options.kernels)


def _show(argv: list[str]) -> int:
    (run,), flags = _split_run("show", argv, words=1)
    options = read_options(ShowRoot, flags).show
    from miles.launch.commands.show import show

    return show(Path(run), options)


def _view(argv: list[str]) -> int:
    runs, _ = split_argv(argv)
    if not runs:
        raise UsageError(f"miles view takes {COMMANDS['view'].usage}; name a run, or a folder of runs.")
    options = read_options(ViewRoot, argv[len(runs) :]).view
    from miles.launch.commands.view import view

    return view([Path(run) for run in runs], options)


def _report(argv: list[str]) -> int:
    argv = ["--output" if word == "-o" else word for word in argv]
    runs, _ = split_argv(argv)
    if not runs:
        raise UsageError(f"miles report takes {COMMANDS['report'].usage}; name a run, or several to compare.")
    options = read_options(ReportRoot, argv[len(runs) :]).report
    from miles.launch.commands.view import report

    return report([Path(run) for run in runs], options)


def _bundle(argv: list[str]) -> int:
    (run,), flags = _split_run("bundle", argv, words=1)
    options = read_options(BundleRoot, flags).bundle
    from miles.launch.commands.bundle import bundle

    return bundle(Path(run), options)


def _convert(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) != 2:
        raise UsageError(f"miles convert takes {COMMANDS['convert'].usage}, but was given {len(words)} folders.")
    options = read_options(ConvertRoot, argv[2:]).convert
    from miles.launch.commands.convert import convert
    from miles.launch.hub.resolve import resolve_model

    return convert(Path(resolve_model(words[0])), Path(words[1]), options)


def _engines(argv: list[str]) -> int:
    (run,), flags = _split_run("engines", argv, words=1)
    options = read_options(EnginesRoot, flags).engines
    from miles.launch.commands.engines import engines

    return engines(Path(run), options)


def _stacks(argv: list[str]) -> int:
    (run,), flags = _split_run("stacks", argv, words=1)
    options = read_options(StacksRoot, flags).stacks
    from miles.launch.runtime.watchdog import print_stacks

    return print_stacks(Path(run), options)


def _replay(argv: list[str]) -> int:
    (run, step), flags = _split_run("replay", argv, words=2)
    options = read_options(ReplayRoot, flags).replay
    if not step.isdecimal():
        raise UsageError(f"miles replay takes a step number after the run, not {step}.")
    config, _, _ = read("train", [str(Path(run) / "config.toml")])
    from miles.launch.replay.command import replay

    return replay(config, Path(run), int(step), options)


def _parity(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) != 1:
        raise UsageError(f"miles parity takes one model or run before its flags, but was given {len(words)}.")
    options = read_options(ParityRoot, argv[1:]).parity
    from miles.launch.hub.resolve import resolve_model
    from miles.launch.parity.command import parity

    other = None if options.other is None else resolve_model(options.other)
    return parity(resolve_model(words[0]), replace(options, other=other))


def _recipes(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) > 1:
        raise UsageError(f"miles recipes takes {COMMANDS['recipes'].usage}, but was given {len(words)} names.")
    options = read_options(RecipesRoot, argv[len(words) :]).recipes
    from miles.launch.recipes.command import recipes

    return recipes(words[0] if words else None, options)


def _init(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) != 1:
        raise UsageError("miles init takes the name of one recipe; miles recipes lists them.")
    options = read_options(InitRoot, argv[1:]).init
    from miles.launch.recipes.command import init

    return init(words[0], options)


def _compare(argv: list[str]) -> int:
    runs, _ = split_argv(argv)
    if not runs:
        raise UsageError(f"miles compare takes {COMMANDS['compare'].usage}; name a run, or several.")
    for run in runs:
        _split_run("compare", [run], words=1)
    options = read_options(CompareRoot, argv[len(runs) :]).compare
    from miles.launch.recipes.command import compare

    return compare([Path(run) for run in runs], options)


def _adopt(argv: list[str]) -> int:
    words, _ = split_argv(argv)
    if len(words) != 1:
        raise UsageError(f"miles adopt takes one checkpoint before its flags, but was given {len(words)}.")
    options = read_options(AdoptRoot, argv[1:]).adopt
    from miles.launch.adopt.command import adopt

    return adopt(words[0], options)


def _split_run(command: str, argv: list[str], *, words: int) -> tuple[list[str], list[str]]:
    """The words before the flags, of which the first is a run, and the flags."""
    found, _ = split_argv(argv)
    if len(found) != words:
        raise UsageError(
            f"miles {command} takes {COMMANDS[command].usage}, but was given {len(found)} words before the flags."
        )
    if not (Path(found[0]) / "config.toml").is_file():
        raise UsageError(f"{found[0]} is not a run; name the directory a run was saved to.")
    return found, argv[words:]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Command:
    usage: str
    help: str
    run: Callable[[list[str]], int]
    root: type[Dataclass] | None
    details: str = ""


_RECIPE = (
    "A recipe is a .toml or .yaml file of the same names (lr = 1e-6), flat or in the sections that --help all shows; "
    'include = "other.toml" loads another one first. Later wins: default, included file, recipe, flag. '
    "--no-<flag> turns a switch off or unsets a value."
)
_MODEL = (
    "Instead of a recipe, a model may be given (a folder, a config.json, or the name of a published one such as "
    "Qwen3-30B-A3B): its memory needs are computed from its config alone. "
)
_FOLDER = (
    "Instead of a recipe, the folder of a checkpoint or of a run, or the name of a model on the hub, may be given. "
)
COMMANDS: dict[str, _Command] = {
    "train": _Command(usage="[RECIPE] [--flags]", help="Train a model.", run=_train, root=Config, details=_RECIPE),
    "plan": _Command(
        usage="[RECIPE | MODEL] [--flags] [--all] [--json] [--gpu NAME]",
        help="Print the options that were set, batch sizes, memory, the time limit of a step and the placement.",
        run=_plan,
        root=Config,
        details=_MODEL
        + _RECIPE
        + " --all prints every option with its value and origin, --json the same for programs. --gpu NAME plans for "
        "that GPU, such as H200, instead of this machine's device: dtype, whether its memory is enough, time limit.",
    ),
    "check": _Command(
        usage="[RECIPE] [--flags]",
        help="Check data, grader, disk, ports, devices and packages of a run in seconds, without loading the model.",
        run=_check,
        root=Config,
        details=_RECIPE,
    ),
    "demo": _Command(
        usage="[--flags]", help="Watch a small model learn on this machine, in minutes.", run=_demo, root=DemoConfig
    ),
    "recipes": _Command(
        usage="[NAME] [--flags]",
        help="List the recipes by model family, hardware and task, or describe one with its memory plan.",
        run=_recipes,
        root=RecipesRoot,
        details="NAME is a recipe as it is listed, such as qwen3/0.6b_gsm8k_1x24gb.",
    ),
    "init": _Command(
        usage="NAME [--output FILE]",
        help="Write a copy of a recipe, with all it includes, to adapt.",
        run=_init,
        root=InitRoot,
        details="NAME is a recipe as miles recipes lists it.",
    ),
    "adopt": _Command(
        usage="CHECKPOINT [--flags]",
        help="From a new checkpoint to a recipe: what serves it, whether it fits, parity with transformers.",
        run=_adopt,
        root=AdoptRoot,
        details="CHECKPOINT is the folder of a Hugging Face checkpoint, or its name on the hub. The exit code is 1 if "
        "parity does not hold or could not be measured.",
    ),
    "doctor": _Command(
        usage="[MODEL] [--kernels]",
        help="Report what this machine can run, what is missing, and whether MODEL fits.",
        run=_doctor,
        root=DoctorRoot,
        details="MODEL is the folder of a Hugging Face checkpoint, or its name on the hub.",
    ),
    "eval": _Command(
        usage="[RECIPE | FOLDER] [--flags]",
        help="Score a checkpoint on held-out prompts.",
        run=_eval,
        root=Config,
        details=_FOLDER + _RECIPE,
    ),
    "chat": _Command(
        usage="[RECIPE | FOLDER] [--flags]",
        help="Talk to a checkpoint.",
        run=_chat,
        root=Config,
        details=_FOLDER + _RECIPE,
    ),
    "show": _Command(
        usage="RUN [--flags]",
        help="Print trajectories of a run, each token coloured by its log-prob.",
        run=_show,
        root=ShowRoot,
        details="RUN is the directory of a run; --no-color prints plain text.",
    ),
    "view": _Command(
        usage="RUN ... [--flags]",
        help="Open runs in the browser: is it learning, curves, time, timeline, every trajectory and token.",
        run=_view,
        root=ViewRoot,
        details="RUN is the directory of a run, live or finished, or a folder of runs. The server only reads, and "
        "listens on this machine alone unless --host says otherwise.",
    ),
    "report": _Command(
        usage="RUN ... [-o FILE]",
        help="Write what the browser shows of a run, or of several side by side, to one HTML file.",
        run=_report,
        root=ReportRoot,
        details="RUN is the directory of a run. The file needs no server and no network. It has the prompts and "
        "responses of some trajectories; --max-trajectories 0 leaves them out.",
    ),
    "compare": _Command(
        usage="RUN ... --reference RECIPE | --write-reference FILE",
        help="Say whether runs are on the reference curve of a recipe, or write such a curve.",
        run=_compare,
        root=CompareRoot,
        details="RUN is the directory of a run, which may be unfinished. The exit code is 0 if every run is on the "
        "curve, else 1.",
    ),
    "bundle": _Command(
        usage="RUN [--flags]",
        help="Pack the config, logs, metrics and versions of a run for a bug report, secrets removed.",
        run=_bundle,
        root=BundleRoot,
        details="RUN is the directory of a run. Weights stay out, and so do prompts and responses without --rollouts.",
    ),
    "engines": _Command(
        usage="RUN [--add ADDRESS ...] [--add-servers N] [--remove ENGINE ...]",
        help="List the engines of a live run, and add or remove some.",
        run=_engines,
        root=EnginesRoot,
    ),
    "stacks": _Command(
        usage="RUN [--flags]",
        help="Print what every process of a live run is doing: the stacks of all its threads.",
        run=_stacks,
        root=StacksRoot,
        details="RUN is the directory of a run on this machine. The run goes on. py-spy is used where it is installed.",
    ),
    "replay": _Command(
        usage="RUN STEP [--flags]",
        help="Repeat a step of a run and compare it bit for bit: tokens, log-probs, metrics, weights.",
        run=_replay,
        root=ReplayRoot,
        details="RUN is the directory of a run. The exit code is 0 if all is equal, else 1.",
    ),
    "convert": _Command(
        usage="IN OUT --format NAME [--keep MODULE ...]",
        help="Write a checkpoint in another precision, quantized or wide, or as Megatron's torch_dist.",
        run=_convert,
        root=ConvertRoot,
        details="IN is the folder of a Hugging Face checkpoint, its name on the hub, or a torch_dist checkpoint of "
        "Megatron; OUT is a folder that does not exist yet. Neither a GPU nor Megatron is needed.",
    ),
    "serve": _Command(
        usage="MODEL [--flags]",
        help="Serve a checkpoint over HTTP: SGLang's API and OpenAI's.",
        run=_serve,
        root=ServeRoot,
        details="MODEL is the folder of a Hugging Face checkpoint, or of a run, whose newest checkpoint is served.",
    ),
    "parity": _Command(
        usage="MODEL [--a BACKEND] [--b BACKEND] [--flags]",
        help="Find the first operation in which two backends differ on the same tokens.",
        run=_parity,
        root=ParityRoot,
        details="MODEL is the folder of a Hugging Face checkpoint, or of a run, whose newest checkpoint is read.",
    ),
    "route": _Command(
        usage="[URL ...] [--flags]",
        help="Route requests to several engines, by load or prefix, with health checks and retries.",
        run=_route,
        root=RouteRoot,
    ),
}


def _dispatch(argv: list[str]) -> int:
    if not argv:
        print(_format_overview(), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("--help", "-h", "help") and not (rest and rest[0] in COMMANDS):
        print(_format_overview())
    elif name in ("--version", "-V"):
        print(f"miles {__version__}")
    elif name == "help":
        print(_format_command_help(rest[0], rest[1:]))
    elif name not in COMMANDS:
        raise UsageError(_describe_unknown_command(name))
    elif "--help" in rest or "-h" in rest:
        at = rest.index("--help" if "--help" in rest else "-h")
        print(_format_command_help(name, [word for word in rest[at + 1 :] if word not in ("--help", "-h")]))
    else:
        return COMMANDS[name].run(rest)
    return 0


def _describe_unknown_command(name: str) -> str:
    if name.endswith(SUFFIXES):
        return f"{name} is a recipe; write miles train {name}."
    if name.startswith("-"):
        return f"{name} comes after a command, as in miles train {name}; the commands are {', '.join(COMMANDS)}."
    close = get_close_matches(name, COMMANDS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(COMMANDS)}."
    return f"{name} is not a command; {hint}"


def _format_overview() -> str:
    lines = [f"  {name.ljust(8)} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "Miles post-trains language models with reinforcement learning.",
            "",
            "usage: miles COMMAND ...",
            "",
            *lines,
            "",
            "miles COMMAND --help describes each, --help all its flags, --help WORD those about WORD.",
        ]
    )


def _format_command_help(name: str, words: Sequence[str] = ()) -> str:
    """The essentials of a command, ``all`` its flags, or those that contain the given words."""
    command = COMMANDS[name]
    if words and list(words) != ["all"] and command.root is not None:
        return search_help(command.root, words)
    parts = [f"usage: miles {name} {command.usage}", command.help, textwrap.fill(command.details, get_terminal_width())]
    if command.root is Config and not words:
        count = len(get_options(Config))
        parts.append(format_essentials(Config, ESSENTIAL_OPTIONS))
        parts.append(f"miles {name} --help all lists all {count} flags; miles {name} --help WORD those about WORD.")
    elif command.root is not None:
        parts.append(format_help(command.root))
    return "\n\n".join(part for part in parts if part)


if __name__ == "__main__":
    sys.exit(main())
