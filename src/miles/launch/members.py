"""The policies of a run, read from ``--policies``: each the whole config with what is its own in it.

Without ``--policies`` there is one, ``actor``, and its config is the run's. A policy that has the ``weights`` of
another is a role more for that one: it answers with its engine, and what it earns trains the same weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from miles.algo.config import AlgoConfig
from miles.config.kind import Misfit
from miles.config.table import knobs_of
from miles.core.errors import UsageError
from miles.launch.config import Config

ACTOR = "actor"
FOLDER = "policies"
"""Where a checkpoint of a run has the policies beside the main one."""
_NAME = re.compile(r"[a-z][a-z0-9_-]*")

SAMPLING = frozenset(
    {
        *("rollout_top_p", "rollout_top_k", "rollout_max_response_len", "rollout_stop", "rollout_stop_token_ids"),
        *("eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len", "apply_chat_template_kwargs"),
    }
)
CREDIT = frozenset(
    {
        *("grpo_std_normalization", "overlong_buffer_len", "overlong_penalty_factor"),
        *("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"),
    }
)
ENGINE = frozenset(
    {
        *("rollout_temperature", "hf_checkpoint"),
        *("engine_max_running", "engine_kv_tokens", "engine_memory_fraction", "engine_prefill_chunk"),
        "engine_prefill_patience",
    }
)
TRAINING = frozenset(
    {
        *(f.name for f in fields(AlgoConfig) if not f.name.startswith(("opd_", "use_opd"))),
        *("global_batch_size", "num_steps_per_rollout", "seed", "ref_load", "critic_load", "critic_lr"),
        *("critic_lr_warmup_iters", "critic_device", "num_critic_only_steps", "optimizer", "lr", "min_lr"),
        *("lr_decay_style", "lr_decay_iters", "lr_warmup_iters", "lr_warmup_fraction", "adam_beta1", "adam_beta2"),
        *("adam_eps", "weight_decay", "muon_momentum", "muon_use_nesterov", "muon_num_ns_steps", "muon_scale_mode"),
        *("muon_extra_scale_factor", "optimizer_state_dtype", "clip_grad", "max_tokens_per_gpu", "micro_batch_size"),
        *("log_probs_chunk_size", "gradient_checkpointing", "offload_train", "share_prefix"),
    }
)
OWN = SAMPLING | CREDIT | ENGINE | TRAINING
"""Knobs that a policy may have a value of its own for; the others are the run's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One policy. ``weights`` names whose it has, mostly its own; ``given`` are the knobs it was named with."""

    name: str
    config: Config
    weights: str
    frozen: bool = False
    train_every: int = 1
    given: frozenset[str] = frozenset()

    @property
    def apart(self) -> bool:
        """Has it weights of its own?"""
        return self.weights == self.name


def members_of(config: Config) -> tuple[Member, ...]:
    """The policies, the main one first; raises (UsageError) all that is wrong with how they are named."""
    members, problems = read_members(config)
    if problems:
        raise UsageError(problems)
    return members


def main_config(config: Config) -> Config:
    """The config of the main policy: where there is one, the run's own."""
    return members_of(config)[0].config


def trained(member: Member, members: tuple[Member, ...]) -> bool:
    """Do its weights learn?"""
    return not next(m for m in members if m.name == member.weights).frozen


def roles_of(owner: Member, members: tuple[Member, ...]) -> tuple[Member, ...]:
    """The policies whose weights are the owner's, itself among them."""
    return tuple(m for m in members if m.weights == owner.name)


def read_members(config: Config) -> tuple[tuple[Member, ...], list[str]]:
    """The policies as far as they can be read, and everything that is wrong with them."""
    named = config.cast.policies
    if not named:
        return (Member(name=ACTOR, config=config, weights=ACTOR),), []
    alone = replace(config, cast=replace(config.cast, policies={}))
    main = ACTOR if ACTOR in named else next(iter(named))
    problems = [p for name, table in named.items() for p in _shape(name, table, named)]
    if problems:
        return (), problems
    problems = [*_fitting(named, main)]
    owners = {name: _member(name, table, alone, main, problems) for name, table in named.items() if not _of(table)}
    if problems:
        return (), problems
    members = dict(owners)
    for name, table in named.items():
        if _of(table):
            base = owners[table["weights"]].config
            members[name] = replace(_member(name, table, base, name, problems), weights=table["weights"])
    ordered = (main, *(name for name in named if name != main))
    return tuple(members[name] for name in ordered), problems


def _of(table: Mapping[str, Any]) -> bool:
    return "weights" in table


def _shape(name: str, table: Any, named: Mapping[str, Any]) -> Iterator[str]:
    """Is it a table, and are the words that are no knobs what they should be?"""
    if not _NAME.fullmatch(name):
        yield f"--policies: {name!r} cannot be a policy's name; use small letters, digits, - and _, a letter first."
    if not isinstance(table, dict):
        yield f'--policies: {name} takes a table of knobs, such as {{"lr": 1e-6}}, not {table!r}.'
        return
    every, frozen = table.get("train_every", 1), table.get("frozen", False)
    if type(every) is not int or every < 1:
        yield f"--policies: train_every of {name} is a number of steps, 1 or more, not {every!r}."
    if type(frozen) is not bool:
        yield f"--policies: frozen of {name} is true or false, not {frozen!r}."
    owner = table.get("weights", name)
    if owner == name and "weights" in table:
        yield f"--policies: {name} has its own weights anyway; leave weights out."
    elif owner not in named:
        yield f"--policies: {name} is to have the weights of {owner!r}, which is no policy; name one of the others."
    elif owner != name and isinstance(named[owner], dict) and "weights" in named[owner]:
        yield f"--policies: {name} is to have the weights of {owner}, which has another's; name that one instead."


def _fitting(named: Mapping[str, Mapping[str, Any]], main: str) -> Iterator[str]:
    """Do the policies go together, and does each say only what means something for it?"""
    first = named[main]
    for word in ("frozen", "weights"):
        if first.get(word):
            yield f"--policies: {main} is the main policy, so it is trained with weights of its own; drop {word}."
    if first.get("train_every", 1) != 1:
        yield f"--policies: {main} is the main policy, whose steps are the run's; drop its train_every."
    for name, table in named.items():
        allowed, why = OWN, ""
        if "weights" in table:
            allowed, why = SAMPLING | CREDIT, f"is {table['weights']}'s to say, whose weights it has"
        elif table.get("frozen"):
            allowed, why = SAMPLING | ENGINE, "means nothing for a policy that is frozen"
        if why and "train_every" in table:
            yield f"--policies: train_every of {name} {why}; leave it out."
        if "weights" in table and "frozen" in table:
            yield f"--policies: frozen of {name} {why}; leave it out."
        yield from (_refused(name, key, allowed, why) for key in _knobs_in(table) if key not in allowed)


def _refused(name: str, key: str, allowed: frozenset[str], why: str) -> str:
    if key in OWN:
        return f"--policies: {key} of {name} {why}; leave it out."
    if key in knobs_of(Config):
        return f"--policies: {key} of {name} is the same for all policies; set it outside."
    close = get_close_matches(key, [*allowed, "train_every", "frozen", "weights"], n=1)
    return f"--policies: {name} has no knob {key}" + (f"; did you mean {close[0]}?" if close else ".")


def _knobs_in(table: Mapping[str, Any]) -> list[str]:
    return [key for key in table if key not in ("train_every", "frozen", "weights")]


def _member(name: str, table: Mapping[str, Any], base: Config, main: str, problems: list[str]) -> Member:
    """The policy with its knobs over those of ``base``; values that do not fit are noted."""
    values: dict[str, dict[str, Any]] = {}
    known = knobs_of(Config)
    for key in (key for key in _knobs_in(table) if key in known):
        try:
            values.setdefault(known[key].room, {})[key] = known[key].kind.from_file(table[key])
        except Misfit as misfit:
            problems.append(f"--policies: {key} of {name} {misfit}.")
    if name != main and "hf_checkpoint" not in table and (found := _saved(base, name)) is not None:
        values.setdefault("models", {})["hf_checkpoint"] = found
    return Member(
        name=name,
        config=replace(base, **{room: replace(getattr(base, room), **its) for room, its in values.items()}),
        weights=name,
        frozen=bool(table.get("frozen", False)),
        train_every=int(table.get("train_every", 1)),
        given=frozenset(_knobs_in(table)),
    )


def _saved(base: Config, name: str) -> str | None:
    """Where the checkpoint of a run with several policies, given as the start, has this one."""
    start = base.models.hf_checkpoint
    folder = None if start is None else Path(start) / FOLDER / name
    return str(folder) if folder is not None and (folder / "config.json").is_file() else None
