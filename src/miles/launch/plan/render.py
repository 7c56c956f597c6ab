"""Output of ``miles plan``: as text and as JSON."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from miles.config.provenance import DEFAULT, Origins, flatten_values
from miles.config.schema import get_options, get_sections
from miles.config.value_types import format_value
from miles.launch.config import Config
from miles.launch.hub.resolve import describe_names
from miles.launch.plan.drafts import choose_speculation
from miles.launch.plan.hardware import choose_device, count_cores, get_free_memory
from miles.launch.plan.memory import MemoryShare, estimate_memory, format_bytes
from miles.launch.plan.objective_text import format_objective
from miles.launch.plan.offload import CACHES
from miles.launch.plan.plan import Plan, count_samples_per_prompt
from miles.launch.plan.prefix_sharing import choose_prefix_sharing, format_prefix_sharing
from miles.launch.plan.step_limit import DeviceLimit, estimate_step_limit, find_device_limit, format_step_limit
from miles.launch.plan.topology import (
    build_resource_request,
    count_engines,
    get_engine_devices,
    is_remote,
    list_splits,
    shares_devices,
    uses_ray,
)
from miles.launch.policies.config import get_main_config
from miles.launch.policies.plan import describe_policies, format_policies
from miles.launch.recipes.catalog import Hardware
from miles.launch.recipes.fit import RecipePlan, estimate_fit, format_gb
from miles.launch.rules.check import list_machine_problems
from miles.launch.rules.paths import read_spec_or_none
from miles.launch.upstream.verify import FlagOutcome, format_flag_outcomes, list_flag_outcomes
from miles.models.accounting.params import active_parameter_count, parameter_count
from miles.models.spec import DecoderSpec


def as_text(config: Config, plan: Plan, origins: Origins, *, every: bool = False, gpu: str | None = None) -> str:
    """The options that were set, or ``every`` one, with their origins, and what follows from them.

    ``gpu`` is the product to plan for, if not the device of this machine.
    """
    main = get_main_config(config)
    spec = read_spec_or_none(main.models.hf_checkpoint, main.models.model_impl)
    assert spec is not None, "the config has passed the rules"
    device = find_device_limit(main, plan, gpu)
    limit = estimate_step_limit(config, plan, spec, device)
    problems = [] if gpu is not None else list_machine_problems(main)
    fit = _format_fit(config, device) if plan.device != "cpu" else []
    policies, config = format_policies(config), describe_names(config)
    parts = [
        *(_format_options(config, origins) if every else _format_set_options(config, origins)),
        *(_format_section("policies", policies) if policies else ()),
        *_format_section(
            "batch", [format_batch_sizes(config, plan), *_format_steps(plan), *_format_data_parallel(plan)]
        ),
        *_format_section("memory", [*_format_memory(main, plan, spec), *fit]),
        *_format_section(
            "time limit of a step",
            format_step_limit(limit),
        ),
        *_format_section("placement", _format_placement(main, plan, spec, gpu)),
        *_format_section("objective", [format_objective(main, plan)]),
        *(_format_section("downloads", _format_downloads(plan)) if plan.downloads else ()),
        *_format_flag_outcomes(list_flag_outcomes(main), every=every),
        *(_format_section("this machine cannot run it", problems) if problems else ()),
    ]
    if not every:
        unset = sum(origin == DEFAULT for origin in origins.values())
        parts.append(f"\n{unset} other options have their defaults; --all prints every one.")
    return "\n".join(parts).lstrip("\n")


def as_json(config: Config, plan: Plan, origins: Origins, *, gpu: str | None = None) -> str:
    """The same for programs."""
    main = get_main_config(config)
    spec = read_spec_or_none(main.models.hf_checkpoint, main.models.model_impl)
    assert spec is not None, "the config has passed the rules"
    sections = {option.name: option.section for option in get_options(type(config)).values()}
    options = {
        name: {"value": value, "origin": origins[name], "section": sections[name]}
        for name, value in flatten_values(describe_names(config)).items()
    }
    prefixes = choose_prefix_sharing(main, plan, spec)
    device = find_device_limit(main, plan, gpu)
    output: dict[str, Any] = {
        "options": options,
        "plan": asdict(plan) | {"optimizer_steps": plan.optimizer_steps},
        "policies": describe_policies(config),
        "objective": format_objective(main, plan),
        "model": asdict(spec) | {"parameters": parameter_count(spec), "active": active_parameter_count(spec)},
        "memory": [asdict(share) for share in estimate_memory(main, plan, spec)],
        "fit": _describe_fit(config, device) if plan.device != "cpu" else None,
        "time_limit": estimate_step_limit(config, plan, spec, device).as_json(),
        "prefix_sharing": {"mode": prefixes.mode, "reason": prefixes.reason},
        "machine_problems": [] if gpu is not None else list_machine_problems(main),
        "upstream_flags": [asdict(each) for each in list_flag_outcomes(main)],
    }
    return json.dumps(output, indent=2, ensure_ascii=False, default=str)


def format_batch_sizes(config: Config, plan: Plan) -> str:
    """The equation of the batch sizes, with its numbers."""
    r = config.rollout
    return (
        f"rollout_batch_size {r.rollout_batch_size} × n_samples_per_prompt {count_samples_per_prompt(config)} "
        f"= {plan.samples_per_step} = "
        f"global_batch_size {plan.global_batch_size} × num_steps_per_rollout {plan.num_steps_per_rollout}"
    )


def _format_options(config: Config, origins: Origins) -> Iterator[str]:
    values = flatten_values(config)
    width = max(map(len, values))
    for section in get_sections(type(config)):
        yield f"\n[{section}]"
        for name, option in get_options(type(config)).items():
            if option.section == section:
                mark = " " if origins[name] == DEFAULT else "*"
                yield f"{mark} {name.ljust(width)}  {format_value(values[name]).ljust(24)}  {origins[name]}"


def _format_set_options(config: Config, origins: Origins) -> Iterator[str]:
    """The options that are not at their defaults, in the order of their sections."""
    values = {name: value for name, value in flatten_values(config).items() if origins[name] != DEFAULT}
    width = max(map(len, values), default=0)
    yield "options"
    yield from (
        f"  {name.ljust(width)}  {format_value(value).ljust(24)}  {origins[name]}" for name, value in values.items()
    )


def _format_flag_outcomes(outcomes: list[FlagOutcome], *, every: bool) -> Iterator[str]:
    """Upstream's flags that change no option: counted by what became of them, or ``every`` one with the reason."""
    if not outcomes:
        return
    lines = format_flag_outcomes(outcomes)
    if every:
        width = max(len(each.given) for each in outcomes)
        lines += [f"{each.given.ljust(width)}  {each.text}" for each in outcomes]
    yield from _format_section("upstream flags", lines)


def _format_section(name: str, lines: list[str]) -> Iterator[str]:
    yield f"\n{name}"
    yield from (f"  {line}" for line in lines)


def _format_downloads(plan: Plan) -> list[str]:
    """What a run would download before it starts."""
    return [
        f"{download.name}: {format_bytes(download.size)} of weights, before training starts"
        for download in plan.downloads
    ]


def _format_steps(plan: Plan) -> list[str]:
    return [f"{plan.steps:,} training steps, {plan.optimizer_steps:,} updates of the weights"]


def _format_data_parallel(plan: Plan) -> list[str]:
    """How a global batch is split over data-parallel ranks."""
    size, parts = plan.global_batch_size, plan.layout.data_parallel_size
    if parts == 1:
        return []
    each = f"{size // parts}" if size % parts == 0 else f"{size // parts} or {size // parts + 1}"
    idle = f"; {parts - size} parts would have none" if size < parts else ""
    return [f"each global batch in {parts} parts of about {each} trajectories, by tokens{idle}"]


def _format_layout(config: Config, plan: Plan) -> list[str]:
    """The parallel sizes; nothing with a single rank."""
    at = plan.layout
    if at.world == 1:
        return []
    sizes = {
        f"{at.tensor} tensor" + (" (sequence parallel)" if at.sequence else ""): at.tensor,
        f"{at.context} context": at.context,
        f"{at.shard} shard": at.shard,
        f"{at.replicate} replicate": at.replicate,
        f"{at.pipeline} pipeline": at.pipeline,
    }
    product = " × ".join(name for name, size in sizes.items() if size > 1)
    experts = f"; experts over {at.expert} of them" if at.expert > 1 else ""
    shards = at.shard_group_size * at.tensor * at.pipeline
    timeout = config.parallel.distributed_timeout_minutes
    return [
        f"layout     {at.world} ranks = {product}{experts}",
        f"           a rank holds 1/{shards} of the parameters and waits {timeout} min for the others",
    ]


def _format_memory(config: Config, plan: Plan, spec: DecoderSpec) -> list[str]:
    shares = estimate_memory(config, plan, spec)
    total = sum(share.bytes for share in shares)
    lines = [_format_share(share) for share in shares]
    if plan.device != "cpu":
        caches = sum(share.bytes for share in shares if share.name in CACHES)
        together = MemoryShare(name="together", bytes=total - caches, note="without the KV cache, at once")
        return [*lines, _format_share(together)]
    lines.append(_format_share(MemoryShare(name="together", bytes=total, note="if all of it were held at once")))
    free = get_free_memory()
    if free is not None:
        verdict = "which fits in" if total < free else "which does NOT fit in"
        lines.append(f"{verdict} the {format_bytes(free)} of free memory here")
    return lines


def _estimate_device_fit(config: Config, device: DeviceLimit) -> tuple[RecipePlan, list[str]] | None:
    """The memory of one GPU by phase, and what does not fit; None where its size is not known."""
    if device.peak is None or device.peak.memory_gb is None:
        return None
    cluster = get_main_config(config).cluster
    nodes, gpus = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node
    hardware = Hardware(
        name=device.name, nodes=nodes, gpus_per_node=gpus, gpu_gb=device.peak.memory_gb, host_gb=sys.maxsize
    )
    fit = estimate_fit(config, hardware)
    return fit, fit.list_memory_problems(hardware)


def _format_fit(config: Config, device: DeviceLimit) -> list[str]:
    """What a GPU holds while training and while sampling, and whether that fits."""
    if (found := _estimate_device_fit(config, device)) is None:
        return []
    fit, problems = found
    phases = [f"training {format_gb(fit.training)}"]
    if fit.plan.samples:
        phases.append(f"sampling {format_gb(fit.sampling)} beside a KV cache of {fit.requests} full sequences")
    lines = [f"{device.name}: {', '.join(phases)}; {format_gb(fit.usable)} are usable"]
    lines = [*lines, *(f"does NOT fit: {problem}" for problem in problems)] if problems else [f"{lines[0]}: it fits"]
    if fit.plan.samples and fit.plan.lease == "colocated":
        place = "in host memory" if fit.offload.offloads else "on the GPU"
        lines.append(f"optimizer {place} while engines sample: {fit.offload.why}")
    return lines


def _describe_fit(config: Config, device: DeviceLimit) -> dict[str, Any] | None:
    if (found := _estimate_device_fit(config, device)) is None:
        return None
    fit, problems = found
    sizes = {name: getattr(fit, name) for name in ("training", "sampling", "usable", "requests")}
    offload = {"offloads": fit.offload.offloads, "why": fit.offload.why}
    return {"device": device.name, **sizes, "offload": offload, "problems": problems}


def _format_share(share: MemoryShare) -> str:
    return f"{share.name.ljust(11)} {format_bytes(share.bytes).rjust(10)}  {share.note}"


def _describe_engines(config: Config) -> str:
    if not is_remote(config):
        return "native engine in this process"
    addresses = config.sglang.rollout_external_engine_addrs
    if addresses:
        return f"running servers: {', '.join(addresses)}"
    kind = "stock SGLang" if config.sglang.rollout_backend == "sglang" else "miles serve"
    return f"{count_engines(config)} × {kind}, {'Ray actors' if uses_ray(config) else 'processes of their own'}"


def _format_devices(config: Config, plan: Plan) -> list[str]:
    """The GPUs of trainer and servers on this machine."""
    starts_servers = is_remote(config) and plan.samples and not config.sglang.rollout_external_engine_addrs
    if not starts_servers or uses_ray(config) or plan.device == "cpu":
        return []
    first, last = get_engine_devices(config, 0), get_engine_devices(config, count_engines(config) - 1)
    whose = "shared with the trainer, in turns" if plan.lease == "colocated" else "shared with the trainer"
    engines = f"engines {_format_range(range(first.start, last.stop))}, " + (
        whose if shares_devices(config) else "their own"
    )
    return [f"GPUs       trainer {_format_range(range(config.cluster.actor_num_gpus_per_node))}; {engines}"]


def _format_range(numbers: range) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _format_elastic(config: Config) -> list[str]:
    """How far GPUs may move between trainer and engines."""
    if not config.elastic.elastic:
        return []
    splits, patience = list_splits(config), config.elastic.elastic_patience
    ranks, engines = [split.ranks for split in splits], [split.engines for split in splits]
    return [
        f"elastic    {min(ranks)} to {max(ranks)} ranks, {min(engines)} to {max(engines)} engines; a GPU moves when "
        f"one side waits for the other {patience} versions in a row"
    ]


def _format_rewards(config: Config) -> list[str]:
    """The reward workers, if there are any."""
    count, each = config.rollout.reward_num_workers, config.rollout.reward_worker_concurrency
    if not count:
        return []
    where = "spread over the cluster" if uses_ray(config) else "on this machine"
    return [f"rewards    in {count} {'process' if count == 1 else 'processes'} {where}, {each} at once in each"]


def _format_cluster(config: Config) -> list[str]:
    """What the run requests from a Ray cluster."""
    if not uses_ray(config):
        return []
    first, *rest = build_resource_request(config).describe()
    return [f"cluster    Ray at {config.ray.ray_address or 'RAY_ADDRESS, else started here'}; {first}"] + [
        f"           {line}" for line in rest
    ]


def _format_precision(config: Config, plan: Plan) -> list[str]:
    """Lines on quantized weights, if there are any."""
    m = config.models
    if m.rollout_format is None:
        return []
    sides = f"engine {m.rollout_format}, trainer {plan.dtype}, which differs by the rounding"
    if m.train_precision != "auto":
        sides = f"engine and trainer {m.train_precision}, the same bytes"
    backward = "" if m.fp8_format is None else f", gradients' GEMMs in FP8 ({m.fp8_format})"
    kept = m.num_layers_at_start_in_bf16 + m.num_layers_at_end_in_bf16 if m.first_last_layers_bf16 else 0
    layers = f", {kept} layers not quantized" if kept else ""
    experts = ", routed experts only" if m.quantize_experts_only else ""
    lines = [f"precision  {sides}{backward}{layers}{experts}"]
    if config.sglang.rollout_backend == "sglang":
        copy = "" if config.sglang.rollout_external_engine_addrs else "load a copy in rollout_checkpoints/ and "
        lines.append(f"           SGLang servers {copy}are sent weights in its layout; their kernels round inputs")
    return lines


def _describe_absent_device(plan: Plan, gpu: str | None) -> str:
    """That the device asked for is not on this machine."""
    if gpu is not None:
        return f", planned for {gpu}"
    found = choose_device("auto")
    return f", but not available here ({found.why})" if plan.device != "cpu" and found.name == "cpu" else ""


def _format_speculation(config: Config, plan: Plan) -> list[str]:
    """What engines draft with, and why."""
    choice = choose_speculation(config)
    if not plan.samples or config.observe.load_debug_rollout_data is not None or not choice.reason:
        return []
    return [f"drafts     {choice.algorithm}: {choice.reason}"]


def _format_placement(config: Config, plan: Plan, spec: DecoderSpec, gpu: str | None) -> list[str]:
    size, active = parameter_count(spec), active_parameter_count(spec)
    experts = "" if active == size else f", {active / 1e6:,.2f}M active per token"
    impl = (
        "" if config.models.model_impl != "transformers" else "; the module of transformers, slower than the native one"
    )
    k = config.schedule.max_weight_staleness
    staleness = "on-policy" if k == 0 else f"tokens at most {k} version{'s' if k > 1 else ''} old"
    threads = "" if plan.device != "cpu" else f" ({config.cluster.num_threads or count_cores()} threads)"
    moves = {
        "shared": "the engine reads the trainer's tensors",
        "copy": "copied at each publication",
        "gathered": "gathered on rank 0 at each publication",
        "served": f"sent to servers at each publication ({config.sglang.update_weight_transport})",
    }[plan.transport]
    turns = "take turns" if plan.lease == "colocated" else "overlap"
    where = "in this process" if plan.layout.world == 1 else f"in {plan.layout.world} processes"
    rollout = f"{_describe_engines(config)}, {plan.tickets} prompts in flight, {staleness}"
    if config.observe.load_debug_rollout_data is not None:
        rollout = f"none: groups are read from {config.observe.load_debug_rollout_data}"
    elif not plan.samples:
        rollout = "none: trains on demonstrations"
    train = f"{config.train.train_backend} {where}, {config.train.max_tokens_per_gpu:,} tokens at once"
    if config.observe.debug_rollout_only:
        train = "none: --debug-rollout-only"
    return [
        f"model      {spec.family}, {size / 1e6:,.2f}M parameters{experts}, {plan.dtype}{impl}",
        *_format_precision(config, plan),
        f"device     {plan.device}{threads}: {plan.device_why}{_describe_absent_device(plan, gpu)}",
        f"rollout    {rollout}",
        *_format_speculation(config, plan),
        f"train      {train}",
        *format_prefix_sharing(config, plan, spec),
        *_format_devices(config, plan),
        *_format_layout(config, plan),
        *_format_rewards(config),
        *_format_elastic(config),
        *_format_cluster(config),
        f"weights    {plan.transport}: {moves}; trainer and engines {turns}",
        f"run        {plan.run_dir}",
    ]
