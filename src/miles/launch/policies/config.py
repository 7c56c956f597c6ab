"""Policies of a run, parsed from ``--policies``: each is the whole config with its own options on top.

Without ``--policies`` there is one policy, ``actor``, with the run's config. A policy that has the ``weights`` of
another is an extra role for that one: it generates with the same engine, and its rewards train the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles.algo.config import AlgoConfig
from miles.config.schema import get_options
from miles.config.value_types import InvalidValue
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.models.lora.config import LoraConfig
from miles.train.config import ParallelConfig

ACTOR = "actor"
POLICIES_FOLDER = "policies"
"""Where a checkpoint of a run has the policies other than the main one."""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_POLICY_KEYS = ("train_every", "frozen", "weights")

SAMPLING_OPTIONS = frozenset(
    [
        "rollout_top_p",
        "rollout_top_k",
        "rollout_max_response_len",
        "rollout_stop",
        "rollout_stop_token_ids",
        "eval_temperature",
        "eval_top_p",
        "eval_top_k",
        "eval_max_response_len",
        "apply_chat_template_kwargs",
    ]
)
ADVANTAGE_OPTIONS = frozenset(
    [
        "grpo_std_normalization",
        "overlong_buffer_len",
        "overlong_penalty_factor",
        "custom_reward_post_process_path",
        "custom_convert_samples_to_train_data_path",
    ]
)
ENGINE_OPTIONS = frozenset(
    [
        "rollout_temperature",
        "hf_checkpoint",
        "engine_max_running",
        "engine_kv_tokens",
        "engine_memory_fraction",
        "engine_prefill_chunk",
        "engine_prefill_delay_steps",
        "engine_vision_cache_mib",
        "rollout_backend",
        "rollout_external_engine_addrs",
        "rollout_num_engines",
        "rollout_num_gpus",
        "rollout_num_gpus_per_engine",
    ]
)
RANK_OPTIONS = frozenset(
    [
        "train_backend",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
    ]
) | {f.name for f in fields(ParallelConfig)}
TRAINING_OPTIONS = frozenset(
    [
        "global_batch_size",
        "num_steps_per_rollout",
        "seed",
        "ref_load",
        "ref_update_interval",
        "opd_teacher_load",
        "critic_load",
        "critic_lr",
        "critic_lr_warmup_iters",
        "critic_device",
        "num_critic_only_steps",
        "optimizer",
        "lr",
        "min_lr",
        "lr_decay_style",
        "lr_decay_iters",
        "lr_warmup_iters",
        "lr_warmup_fraction",
        "adam_beta1",
        "adam_beta2",
        "adam_eps",
        "weight_decay",
        "muon_momentum",
        "muon_use_nesterov",
        "muon_num_ns_steps",
        "muon_scale_mode",
        "muon_extra_scale_factor",
        "optimizer_state_dtype",
        "clip_grad",
        "max_tokens_per_gpu",
        "max_patches_per_gpu",
        "vision_lr",
        "freeze_vision_tower",
        "freeze_vision_projector",
        "micro_batch_size",
        "log_probs_chunk_size",
        "gradient_checkpointing",
        "offload_train",
        "share_prefix",
    ]
) | {f.name for f in fields(AlgoConfig)}
ADAPTER_OPTIONS = frozenset(f.name for f in fields(LoraConfig))
POLICY_OPTIONS = (
    SAMPLING_OPTIONS | ADVANTAGE_OPTIONS | ENGINE_OPTIONS | TRAINING_OPTIONS | RANK_OPTIONS | ADAPTER_OPTIONS
)
"""Options that a policy may have its own value for; the others are the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """One policy. ``weights`` names the policy whose weights it has; ``own_options`` are those set in --policies."""

    name: str
    config: Config
    weights: str
    frozen: bool = False
    train_every: int = 1
    own_options: frozenset[str] = frozenset()

    @property
    def owns_weights(self) -> bool:
        return self.weights == self.name


def get_policies(config: Config) -> tuple[PolicyConfig, ...]:
    """The policies, the main one first; raises UsageError with every problem of --policies."""
    policies, problems = parse_policies(config)
    if problems:
        raise UsageError(problems)
    return policies


def get_main_config(config: Config) -> Config:
    """The config of the main policy; with one policy, the run's own."""
    return get_policies(config)[0].config


def is_trained(policy: PolicyConfig, policies: tuple[PolicyConfig, ...]) -> bool:
    """Whether its weights are trained."""
    return not next(p for p in policies if p.name == policy.weights).frozen


def list_roles(owner: PolicyConfig, policies: tuple[PolicyConfig, ...]) -> tuple[PolicyConfig, ...]:
    """The policies that have the owner's weights, the owner included."""
    return tuple(p for p in policies if p.weights == owner.name)


def parse_policies(config: Config) -> tuple[tuple[PolicyConfig, ...], list[str]]:
    """The policies as far as they can be parsed, and every problem."""
    tables = config.multi_agent.policies
    if not tables:
        return (PolicyConfig(name=ACTOR, config=config, weights=ACTOR),), []
    base = replace(config, multi_agent=replace(config.multi_agent, policies={}))
    main = ACTOR if ACTOR in tables else next(iter(tables))
    problems = [problem for name, table in tables.items() for problem in _check_table(name, table, tables)]
    if problems:
        return (), problems
    problems = [*_check_options(tables, main)]
    owners = {
        name: _parse_policy(name, table, base, main, problems)
        for name, table in tables.items()
        if "weights" not in table
    }
    if problems:
        return (), problems
    policies = dict(owners)
    for name, table in tables.items():
        if "weights" in table:
            owner = owners[table["weights"]].config
            policies[name] = replace(_parse_policy(name, table, owner, name, problems), weights=table["weights"])
    ordered = (main, *(name for name in tables if name != main))
    return tuple(policies[name] for name in ordered), problems


def _check_table(name: str, table: Any, tables: Mapping[str, Any]) -> Iterator[str]:
    """Check the name, and the keys that are not options."""
    if not _NAME.fullmatch(name):
        yield f"--policies: {name!r} is not a policy name; use lower-case letters, digits, - and _, a letter first."
    if not isinstance(table, dict):
        yield f'--policies: {name} takes a table of options, such as {{"lr": 1e-6}}, not {table!r}.'
        return
    every, frozen = table.get("train_every", 1), table.get("frozen", False)
    if type(every) is not int or every < 1:
        yield f"--policies: train_every of {name} takes a number of steps, at least 1, not {every!r}."
    if type(frozen) is not bool:
        yield f"--policies: frozen of {name} takes true or false, not {frozen!r}."
    owner = table.get("weights", name)
    if owner == name and "weights" in table:
        yield f"--policies: {name} has its own weights anyway; remove weights."
    elif owner not in tables:
        yield f"--policies: weights of {name} names {owner!r}, which is not a policy; name one of the others."
    elif owner != name and isinstance(tables[owner], dict) and "weights" in tables[owner]:
        yield f"--policies: weights of {name} names {owner}, which has another's weights; name that one instead."


def _check_options(tables: Mapping[str, Mapping[str, Any]], main: str) -> Iterator[str]:
    """Check that each policy sets only options that have an effect for it."""
    for key in ("frozen", "weights"):
        if tables[main].get(key):
            yield f"--policies: {main} is the main policy and is trained with its own weights; remove {key}."
    if tables[main].get("train_every", 1) != 1:
        yield f"--policies: {main} is the main policy and is trained every step; remove its train_every."
    for name, table in tables.items():
        allowed, reason = _select_allowed_options(table)
        if reason and "train_every" in table:
            yield f"--policies: train_every of {name} {reason}; remove it."
        if "weights" in table and "frozen" in table:
            yield f"--policies: frozen of {name} {reason}; remove it."
        for key in _list_options(table):
            if key not in allowed:
                yield _describe_bad_option(name, key, allowed, reason)


def _select_allowed_options(table: Mapping[str, Any]) -> tuple[frozenset[str], str]:
    """The options a policy may set, and why it may not set the others ("" where it may set all)."""
    if "weights" in table:
        return SAMPLING_OPTIONS | ADVANTAGE_OPTIONS, f"is set by {table['weights']}, whose weights it has"
    if table.get("frozen"):
        return SAMPLING_OPTIONS | ENGINE_OPTIONS, "has no effect for a frozen policy"
    return POLICY_OPTIONS, ""


def _describe_bad_option(name: str, key: str, allowed: frozenset[str], reason: str) -> str:
    if key in POLICY_OPTIONS:
        return f"--policies: {key} of {name} {reason}; remove it."
    if key in get_options(Config):
        return f"--policies: {key} of {name} is the same for all policies; set it outside --policies."
    close = get_close_matches(key, [*allowed, *_POLICY_KEYS], n=1)
    return f"--policies: {name} has no option {key}" + (f"; did you mean {close[0]}?" if close else ".")


def _list_options(table: Mapping[str, Any]) -> list[str]:
    return [key for key in table if key not in _POLICY_KEYS]


def _parse_policy(name: str, table: Mapping[str, Any], base: Config, main: str, problems: list[str]) -> PolicyConfig:
    """The policy with its options over those of ``base``; invalid values are added to ``problems``."""
    values: dict[str, dict[str, Any]] = {}
    options = get_options(Config)
    for key in (key for key in _list_options(table) if key in options):
        try:
            value = options[key].value_type.from_file(table[key])
            options[key].check_range(value)
            values.setdefault(options[key].section, {})[key] = value
        except InvalidValue as error:
            problems.append(f"--policies: {key} of {name} {error}.")
    if name != main and "hf_checkpoint" not in table and (saved := _find_saved_policy(base, name)) is not None:
        values.setdefault("models", {})["hf_checkpoint"] = saved
    sections = {section: replace(getattr(base, section), **own) for section, own in values.items()}
    return PolicyConfig(
        name=name,
        config=replace(base, **sections),
        weights=name,
        frozen=bool(table.get("frozen", False)),
        train_every=int(table.get("train_every", 1)),
        own_options=frozenset(_list_options(table)),
    )


def _find_saved_policy(base: Config, name: str) -> str | None:
    """Where the checkpoint of a multi-policy run, given as --hf-checkpoint, has this policy."""
    start = base.models.hf_checkpoint
    folder = None if start is None else Path(start) / POLICIES_FOLDER / name
    return str(folder) if folder is not None and (folder / "config.json").is_file() else None
