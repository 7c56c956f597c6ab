"""Verification of upstream's flags that change no option: each restates what is so, has no effect, or is a problem."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from miles.backends.remote.sglang_flags import PREFIX as SGLANG
from miles.config.cli import FlagArgs, split_argv
from miles.core.errors import MilesError
from miles.launch.config import Config
from miles.launch.rules.flags import NOTED_FLAGS, list_set_flags
from miles.launch.rules.paths import read_spec_or_none
from miles.launch.upstream.shape import find_shape_problem
from miles.launch.upstream.table import UpstreamFlag, describe_missing, find_upstream_flag
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.spec import DecoderSpec

Outcome = Literal["checkpoint", "exact", "design", "noted", "problem"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagOutcome:
    """A flag as it was given, and what became of it; ``text`` is why, or the sentence of a problem."""

    given: str
    outcome: Outcome
    text: str


_CONVERSION = "weights are read from --hf-checkpoint, which needs no conversion"
_OWN_FLAGS = {
    "--ref-load": _CONVERSION,
    "--load": _CONVERSION,
    "--loss-mask-type": "the chat template of the checkpoint says which tokens are replies",
}


def check_upstream_flags(c: Config) -> Iterator[str]:
    """A rule: flags of upstream that disagree with the checkpoint, or ask for what is not supported."""
    yield from (each.text for each in list_flag_outcomes(c) if each.outcome == "problem")


def list_flag_outcomes(c: Config) -> list[FlagOutcome]:
    """What became of every flag of upstream that changes no option, in the order given; of repeated ones the last."""
    flags = {args.flag: args for args in split_argv(c.upstream.upstream_flags)[1]}
    spec = read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl) if flags else None
    config = _read_config(c.models.hf_checkpoint) if spec is not None else {}
    outcomes = [_judge(args, c, spec, config) for args in flags.values()]
    return [*outcomes, *_list_unused_sglang_flags(c), *_list_unused_options(c)]


def _judge(args: FlagArgs, c: Config, spec: DecoderSpec | None, config: Mapping[str, Any]) -> FlagOutcome:
    row = find_upstream_flag(args.flag)
    if row is None:
        return _refuse(args, "is not a flag of upstream; remove it")
    if args.flag in _OWN_FLAGS:  # an option here, with a value of upstream's that has no effect
        return _note(args, _OWN_FLAGS[args.flag])
    match row.kind:
        case "shape":
            return _judge_shape(args, spec, config)
        case "exact" | "design" | "router" if _is_agreed(args, row):
            return FlagOutcome(given=str(args), outcome="design" if row.kind == "design" else "exact", text=row.text)
        case "exact" | "design" | "router":
            return _refuse(args, describe_missing(row.feature))
        case "engine" if row.feature and not row.accepts(args.words):
            return _refuse(args, describe_missing(row.feature))
        case "fresh" if _loads_state(c):
            return _refuse(args, describe_missing(row.feature))
        case "map" | "engine":
            return _note(args, f"{row.text.split()[0]} is given too")
        case _:
            return _note(args, row.text)


def _is_agreed(args: FlagArgs, row: UpstreamFlag) -> bool:
    """Whether the value restates what is so; a flag of routers without a value turns something on."""
    return row.accepts(args.words) and (row.kind != "router" or bool(args.words))


def _judge_shape(args: FlagArgs, spec: DecoderSpec | None, config: Mapping[str, Any]) -> FlagOutcome:
    if spec is None:  # another rule says why
        return _note(args, "the checkpoint cannot be read")
    try:
        problem = find_shape_problem(args.flag, args.words, spec, config)
    except KeyError:
        return _note(args, "config.json of the checkpoint does not say")
    if problem is not None:
        return FlagOutcome(given=str(args), outcome="problem", text=problem)
    return FlagOutcome(given=str(args), outcome="checkpoint", text="config.json of the checkpoint says the same")


def _list_unused_sglang_flags(c: Config) -> list[FlagOutcome]:
    """Flags of SGLang's server where no such server is started."""
    if c.sglang.rollout_backend == "sglang" and not c.sglang.rollout_external_engine_addrs:
        return []
    flags = {args.flag: args for args in split_argv(c.sglang.sglang_flags)[1]}
    named = [FlagArgs(flag=SGLANG + args.flag[2:], words=args.words) for args in flags.values()]
    return [_note(args, _explain_unused(find_upstream_flag(args.flag))) for args in named]


def _list_unused_options(c: Config) -> list[FlagOutcome]:
    """Options here that have no effect in this run."""
    unmet = [rule for rule in NOTED_FLAGS if not rule.is_met(c)]
    return [
        FlagOutcome(given=flag, outcome="noted", text=f"it needs {rule.needed}")
        for rule in unmet
        for flag in list_set_flags(c, *rule.flags)
    ]


def _explain_unused(row: UpstreamFlag | None) -> str:
    return row.text if row is not None and row.kind in ("served", "noted") else "it is an option of SGLang"


def _loads_state(c: Config) -> bool:
    return c.schedule.load is not None and Path(c.schedule.load).exists()


def _read_config(folder: str | None) -> Mapping[str, Any]:
    try:
        return {} if folder is None else read_config(folder)
    except MilesError:
        return {}


def _note(args: FlagArgs, text: str) -> FlagOutcome:
    return FlagOutcome(given=str(args), outcome="noted", text=text)


def _refuse(args: FlagArgs, text: str) -> FlagOutcome:
    return FlagOutcome(given=str(args), outcome="problem", text=f"{args} {text}.")


_FOLDED: Mapping[Outcome, str] = {
    "checkpoint": "the checkpoint: agreed",
    "exact": "of Megatron's implementation: what is computed here is at least that exact",
    "design": "what a run does anyway",
}


def format_flag_outcomes(outcomes: Sequence[FlagOutcome]) -> list[str]:
    """One folded line for each kind of outcome."""
    lines: list[str] = []
    for outcome, text in _FOLDED.items():
        if found := [each for each in outcomes if each.outcome == outcome]:
            verb = "" if outcome == "exact" else " restates" if len(found) == 1 else " restate"
            lines.append(f"{_count(len(found))}{verb} {text}")
    noted = [each.given.split()[0] for each in outcomes if each.outcome == "noted"]
    if noted:
        lines.append(f"{_count(len(noted))} {'has' if len(noted) == 1 else 'have'} no effect here: {', '.join(noted)}")
    return lines


def _count(number: int) -> str:
    return f"{number} flag{'' if number == 1 else 's'}"
