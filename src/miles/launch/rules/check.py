"""Validation of a config: every rule that a command must pass, run so that one problem hides no other.

A rule yields a sentence for each problem, with the flag and the fix; it never changes a value. It sees the config as
far as it could be parsed: a rule that reads an invalid option is skipped, so no message follows from another.
"""

from collections.abc import Sequence
from typing import Any, Literal, cast

from miles.config.provenance import ParseResult
from miles.launch.config import Config
from miles.launch.policies.rules import check_policies
from miles.launch.rules.algorithm import ALGORITHM_RULES
from miles.launch.rules.data import DATA_RULES, GENERATION_RULES, check_eval_has_held_out_sets, check_max_positions
from miles.launch.rules.distillation import DISTILLATION_RULES
from miles.launch.rules.drafts import DRAFT_RULES
from miles.launch.rules.engines import ENGINE_MACHINE_RULES, ENGINE_RULES, SERVER_RULES, check_engine_gpus
from miles.launch.rules.flags import FLAG_RULES, Rule
from miles.launch.rules.hooks import HOOK_RULES, check_hook_paths
from miles.launch.rules.model import (
    MODEL_RULES,
    check_accelerator,
    check_checkpoint,
    check_exact_model,
    check_hub_token,
    check_no_lora,
    check_push_to_hub,
    check_save_remote,
)
from miles.launch.rules.precision import PRECISION_RULES, check_quantized_model, check_transformer_engine
from miles.launch.rules.schedule import SCHEDULE_RULES
from miles.launch.rules.trackers import TRACKER_MACHINE_RULES, TRACKER_RULES
from miles.launch.rules.training import TRAINING_MACHINE_RULES, TRAINING_RULES, check_in_process
from miles.launch.upstream.verify import check_upstream_flags

Command = Literal["train", "plan", "eval", "chat", "open"]
"""A command of the command line, or ``open``, the library's, which gives a policy to a program's own loop."""

_CHAT_RULES: tuple[Rule, ...] = (
    check_checkpoint,
    check_no_lora,
    *ENGINE_RULES,
    check_exact_model,
    check_quantized_model,
    check_engine_gpus,
    check_accelerator,
)
_TRAIN_RULES: tuple[Rule, ...] = (
    check_checkpoint,
    check_push_to_hub,
    check_save_remote,
    *DATA_RULES,
    *GENERATION_RULES,
    check_hook_paths,
    *SCHEDULE_RULES,
    *ALGORITHM_RULES,
    *FLAG_RULES,
    *TRACKER_RULES,
    *DISTILLATION_RULES,
    *DRAFT_RULES,
    *MODEL_RULES,
    *PRECISION_RULES,
    *HOOK_RULES,
    *ENGINE_RULES,
    *SERVER_RULES,
    *TRAINING_RULES,
    check_max_positions,
    check_upstream_flags,
)
_MACHINE_RULES: tuple[Rule, ...] = (
    check_accelerator,
    check_hub_token,
    *ENGINE_MACHINE_RULES,
    *TRACKER_MACHINE_RULES,
    *TRAINING_MACHINE_RULES,
    check_transformer_engine,
)
"""What this machine must have; a plan may be for another one, and says what is missing here."""

RULES: dict[Command, tuple[Rule, ...]] = {
    "train": (*_TRAIN_RULES, *_MACHINE_RULES),
    "plan": _TRAIN_RULES,
    "eval": (
        *_CHAT_RULES,
        *GENERATION_RULES,
        check_hook_paths,
        check_eval_has_held_out_sets,
        check_max_positions,
    ),
    "chat": _CHAT_RULES,
    "open": (
        check_checkpoint,
        check_in_process,
        check_hook_paths,
        *ALGORITHM_RULES,
        *FLAG_RULES,
        *MODEL_RULES,
        *PRECISION_RULES,
        *ENGINE_RULES,
        *TRAINING_RULES,
        check_max_positions,
        *_MACHINE_RULES,
    ),
}


def check_rules(result: ParseResult[Config], command: Command) -> list[str]:
    """Every problem that ``command`` has with this config, beyond those of parsing it."""
    if result.config is None:
        return []

    def check(config: Config) -> list[str]:
        guarded = cast(Config, _GuardedConfig(config, result.invalid))
        return [problem for rule in RULES[command] for problem in _apply_rule(rule, guarded)]

    return check_policies(result.config, check)


def list_machine_problems(config: Config) -> list[str]:
    """Why a run that can be planned could not be trained on this machine."""
    return [problem for rule in _MACHINE_RULES for problem in _apply_rule(rule, config)]


class _InvalidOptionRead(Exception):
    """A rule read an option whose value is unknown."""


class _GuardedConfig:
    """A config whose invalid options cannot be read."""

    def __init__(self, config: Any, invalid: frozenset[str]) -> None:
        self._config = config
        self._invalid = invalid

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        if hasattr(value, "__dataclass_fields__"):
            return _GuardedConfig(value, self._invalid)
        if name in self._invalid:
            raise _InvalidOptionRead(name)
        return value


def _apply_rule(rule: Rule, config: Config) -> Sequence[str]:
    try:
        return list(rule(config))
    except _InvalidOptionRead:
        return ()
    except OSError as error:  # a path that cannot even be looked at
        return (f"{error.filename} cannot be read: {error.strerror}.",)
