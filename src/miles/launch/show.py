"""A plan as text for people and as JSON for programs."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from miles.config.help import shown
from miles.config.origin import DEFAULT, Origins, values_of
from miles.config.table import knobs_of, rooms_of
from miles.launch.config import Config
from miles.launch.elastic_rules import splits_of
from miles.launch.formula import objective
from miles.launch.found import spec_or_none
from miles.launch.machine import cores, free_memory
from miles.launch.member_plan import policy_lines, policy_rows
from miles.launch.members import main_config
from miles.launch.memory import Share, shares_of, sized
from miles.launch.plan import Plan
from miles.launch.ray_rules import need_of, on_ray
from miles.launch.server_rules import engine_count, is_remote
from miles.models.footprint import active_parameter_count, parameter_count
from miles.models.spec import DecoderSpec


def as_text(config: Config, plan: Plan, origins: Origins) -> str:
    """Every knob with its value and origin, then what follows from them."""
    main = main_config(config)
    spec = spec_or_none(main.models.hf_checkpoint, main.models.model_impl)
    assert spec is not None, "a plan is shown of a config that breaks no rule"
    policies = policy_lines(config)
    parts = [
        *_knobs(config, origins),
        *(_section("policies", policies) if policies else ()),
        *_section("batch", [identity(config, plan), *_steps(plan), *_parts(plan)]),
        *_section("objective", [objective(main, plan)]),
        *_section("memory", _memory(main, plan, spec)),
        *_section("placement", _placement(main, plan, spec)),
    ]
    return "\n".join(parts).lstrip("\n")


def as_json(config: Config, plan: Plan, origins: Origins) -> str:
    """The same for programs."""
    main = main_config(config)
    spec = spec_or_none(main.models.hf_checkpoint, main.models.model_impl)
    assert spec is not None, "a plan is shown of a config that breaks no rule"
    rooms = {knob.name: knob.room for knob in knobs_of(type(config)).values()}
    knobs = {
        name: {"value": value, "origin": origins[name], "room": rooms[name]}
        for name, value in values_of(config).items()
    }
    whole: dict[str, Any] = {
        "knobs": knobs,
        "plan": asdict(plan) | {"optimizer_steps": plan.optimizer_steps},
        "policies": policy_rows(config),
        "objective": objective(main, plan),
        "model": asdict(spec) | {"parameters": parameter_count(spec), "active": active_parameter_count(spec)},
        "memory": [asdict(share) for share in shares_of(main, plan, spec)],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False, default=str)


def identity(config: Config, plan: Plan) -> str:
    """The batch identity with its numbers."""
    r = config.rollout
    return (
        f"rollout_batch_size {r.rollout_batch_size} × n_samples_per_prompt {r.n_samples_per_prompt} "
        f"= {plan.samples_per_step} = "
        f"global_batch_size {plan.global_batch_size} × num_steps_per_rollout {plan.num_steps_per_rollout}"
    )


def _knobs(config: Config, origins: Origins) -> Iterator[str]:
    values = values_of(config)
    wide = max(map(len, values))
    for room in rooms_of(type(config)):
        yield f"\n[{room}]"
        for knob in knobs_of(type(config)).values():
            if knob.room == room:
                mark = " " if origins[knob.name] == DEFAULT else "*"
                yield f"{mark} {knob.name.ljust(wide)}  {shown(values[knob.name]).ljust(24)}  {origins[knob.name]}"


def _section(name: str, lines: list[str]) -> Iterator[str]:
    yield f"\n{name}"
    yield from (f"  {line}" for line in lines)


def _steps(plan: Plan) -> list[str]:
    return [f"{plan.steps:,} training steps, {plan.optimizer_steps:,} updates of the weights"]


def _parts(plan: Plan) -> list[str]:
    """How a global batch is dealt out."""
    size, parts = plan.global_batch_size, plan.layout.parts
    if parts == 1:
        return []
    each = f"{size // parts}" if size % parts == 0 else f"{size // parts} or {size // parts + 1}"
    idle = f"; {parts - size} parts would have none" if size < parts else ""
    return [f"each global batch in {parts} parts of about {each} trajectories, by tokens{idle}"]


def _layout(config: Config, plan: Plan) -> list[str]:
    """Over how many ranks each thing is cut; nothing where one rank trains."""
    at = plan.layout
    if at.world == 1:
        return []
    cuts = {
        f"{at.tensor} tensor" + (" (sequence parallel)" if at.sequence else ""): at.tensor,
        f"{at.context} context": at.context,
        f"{at.shard} shard": at.shard,
        f"{at.replicate} replicate": at.replicate,
        f"{at.pipeline} pipeline": at.pipeline,
    }
    told = " × ".join(name for name, size in cuts.items() if size > 1)
    inside = f"; experts over {at.expert} of them" if at.expert > 1 else ""
    pieces = at.pieces * at.tensor * at.pipeline
    wait = config.parallel.distributed_timeout_minutes
    return [
        f"layout     {at.world} ranks = {told}{inside}",
        f"           a rank holds 1/{pieces} of the parameters and waits {wait} min for the others",
    ]


def _memory(config: Config, plan: Plan, spec: DecoderSpec) -> list[str]:
    shares = shares_of(config, plan, spec)
    total = sum(share.bytes for share in shares)
    lines = [_share(share) for share in shares]
    lines.append(_share(Share(name="together", bytes=total, note="if all of it were held at once")))
    free = free_memory() if plan.device == "cpu" else None
    if free is not None:
        verdict = "which fits in" if total < free else "which does NOT fit in"
        lines.append(f"{verdict} the {sized(free)} of free memory here")
    return lines


def _share(share: Share) -> str:
    return f"{share.name.ljust(11)} {sized(share.bytes).rjust(10)}  {share.note}"


def _engines(config: Config) -> str:
    if not is_remote(config):
        return "native engine in this process"
    addresses = config.sglang.rollout_external_engine_addrs
    if addresses:
        return f"servers that run already: {', '.join(addresses)}"
    kind = "stock SGLang" if config.sglang.rollout_backend == "sglang" else "miles serve"
    return f"{engine_count(config)} × {kind}, {'actors of the cluster' if on_ray(config) else 'processes of their own'}"


def _elastic(config: Config) -> list[str]:
    """How far devices may move between the planes, if they do."""
    if not config.bounds.elastic:
        return []
    every, patience = splits_of(config), config.bounds.elastic_patience
    ranks, engines = [split.ranks for split in every], [split.engines for split in every]
    return [
        f"elastic    {min(ranks)} to {max(ranks)} ranks, {min(engines)} to {max(engines)} engines; a device moves when "
        f"one plane waits for the other {patience} versions in a row"
    ]


def _rewards(config: Config) -> list[str]:
    """Which processes compute rewards, where the run's own does not."""
    count, each = config.rollout.reward_num_workers, config.rollout.reward_worker_concurrency
    if not count:
        return []
    where = "spread over the cluster" if on_ray(config) else "on this machine"
    return [f"rewards    in {count} {'process' if count == 1 else 'processes'} {where}, {each} at once in each"]


def _cluster(config: Config) -> list[str]:
    """What is asked of a Ray cluster, if one is."""
    if not on_ray(config):
        return []
    first, *rest = need_of(config).lines()
    return [f"cluster    Ray at {config.ray.ray_address or 'RAY_ADDRESS, else started here'}; {first}"] + [
        f"           {line}" for line in rest
    ]


def _placement(config: Config, plan: Plan, spec: DecoderSpec) -> list[str]:
    size, active = parameter_count(spec), active_parameter_count(spec)
    experts = "" if active == size else f", {active / 1e6:,.2f}M of them for a token"
    whose = "" if config.models.model_impl != "transformers" else "; transformers' own module, slower than ours"
    k = config.schedule.max_weight_staleness
    drift = "on-policy" if k == 0 else f"tokens at most {k} version{'s' if k > 1 else ''} old"
    threads = "" if plan.device != "cpu" else f" ({config.cluster.num_threads or cores()} threads)"
    moves = {
        "shared": "the engine reads the trainer's own",
        "copy": "copied at each publication",
        "gathered": "put together on rank 0 at each publication",
        "served": f"sent to servers at each publication ({config.sglang.update_weight_transport})",
    }[plan.transport]
    where = "in this process" if plan.layout.world == 1 else f"in {plan.layout.world} processes"
    rollout = f"{_engines(config)}, {plan.tickets} prompts in flight, {drift}"
    if config.observe.load_debug_rollout_data is not None:
        rollout = f"none: groups are read from {config.observe.load_debug_rollout_data}"
    elif not plan.samples:
        rollout = "none: demonstrations are read, nothing is sampled"
    train = f"{config.train.train_backend} {where}, {config.train.max_tokens_per_gpu:,} tokens at once"
    if config.observe.debug_rollout_only:
        train = "none: --debug-rollout-only"
    return [
        f"model      {spec.family}, {size / 1e6:,.2f}M parameters{experts}, {plan.dtype}{whose}",
        f"device     {plan.device}{threads}: {plan.device_why}",
        f"rollout    {rollout}",
        f"train      {train}",
        *_layout(config, plan),
        *_rewards(config),
        *_elastic(config),
        *_cluster(config),
        f"weights    {plan.transport}: {moves}; lease {plan.lease}",
        f"run        {plan.run_dir}",
    ]
