"""Whether a recipe fits its hardware: the memory of the fullest GPU while training and while sampling. No torch."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from miles.config.schema import get_options
from miles.core.errors import UsageError
from miles.launch.config import Config
from miles.launch.plan.memory import MemoryShare, estimate_memory
from miles.launch.plan.offload import (
    CACHES,
    ENGINE_SHARES,
    OPTIMIZER_SHARES,
    STEP_SHARES,
    USABLE,
    OffloadChoice,
    add_shares,
    choose_offload,
)
from miles.launch.plan.plan import Plan, build_plan
from miles.launch.plan.running_requests import count_running_requests
from miles.launch.plan.topology import count_engines, get_world_size, is_remote, shares_devices
from miles.launch.policies.config import get_policies
from miles.launch.recipes.catalog import Hardware, Recipe, parse_recipe
from miles.models.accounting.known_models import find_known_config
from miles.models.accounting.params import kv_bytes_per_token, parameter_count, state_bytes_per_sequence
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.resolve import resolve_spec
from miles.models.spec import DecoderSpec
from miles.rollout.config import resolve_context_limit

MIN_REQUESTS = 8
"""Requests of full length for which an engine must have a KV cache; with fewer, sampling is slower than it need be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePlan:
    """Bytes on the fullest GPU while training and while sampling, without the KV cache in turns; of a node's host.

    ``requests`` is how many sequences of full length the KV cache of an engine has room for. ``num_gpus`` counts the
    GPUs of trainer and engines.
    """

    parameters: int
    plan: Plan
    config: Config
    training: int
    sampling: int
    host: int
    offload: OffloadChoice
    requests: int
    num_gpus: int
    usable: int

    def list_problems(self, hardware: Hardware) -> list[str]:
        """Why it does not fit; nothing where it does."""
        return [*_find_layout_problems(self, hardware), *_find_memory_problems(self, hardware)]

    def list_memory_problems(self, hardware: Hardware) -> list[str]:
        """Why it does not fit in the memory of these GPUs and hosts, however many there are."""
        return list(_find_memory_problems(self, hardware))


def plan_recipe(recipe: Recipe) -> RecipePlan:
    """The plan of a recipe for the published shapes of its models; UsageError where a shape is not known."""
    assert recipe.hardware is not None, "a recipe for any hardware has no plan"
    with tempfile.TemporaryDirectory() as scratch:
        config = use_published_shapes(parse_recipe(recipe), recipe, Path(scratch))
        return estimate_fit(config, recipe.hardware)


def estimate_fit(config: Config, hardware: Hardware) -> RecipePlan:
    """The memory of a config, all its policies together, on that hardware."""
    policies = [policy.config for policy in get_policies(config) if policy.owns_weights] or [config]
    fits = [_estimate_policy(policy, hardware, len(policies)) for policy in policies]
    main = fits[0]
    return replace(
        main,
        training=sum(fit.training for fit in fits),
        sampling=sum(fit.sampling for fit in fits),
        host=sum(fit.host for fit in fits),
        requests=min(fit.requests for fit in fits) // len(fits),
    )


def _estimate_policy(config: Config, hardware: Hardware, num_policies: int) -> RecipePlan:
    plan = replace(build_plan(config), num_policies=num_policies)
    spec = resolve_spec(str(config.models.hf_checkpoint), config.models.model_impl)
    shares = estimate_memory(config, plan, spec)
    usable = round(hardware.gpu_gb * 1e9 * USABLE)
    trainer = _add(shares, lambda name: name not in ENGINE_SHARES)
    engine = _add(shares, lambda name: name in ENGINE_SHARES and name not in CACHES)
    shared = shares_devices(config) or not is_remote(config)
    resident = _add(shares, lambda name: name not in (*ENGINE_SHARES, *STEP_SHARES))
    choice = choose_offload(config, plan, spec, round(hardware.gpu_gb * 1e9))
    optimizer = add_shares(shares, OPTIMIZER_SHARES)
    if choice.offloads:
        resident -= optimizer
    sampling = engine + (resident if shared else 0)
    # Where the optimizer was chosen to stay, it fits beside a KV cache that was sized before it was there.
    early = optimizer if choice.is_automatic and not choice.offloads and shared else 0
    requests = _count_requests(config, plan, spec, usable - sampling + early) if plan.samples else 0
    kv_cache = 0
    if shared and (plan.lease != "colocated" or config.schedule.offload_rollout is False):
        kv_cache = _add(shares, lambda name: name in CACHES)  # the engine keeps it while the trainer works
    own_gpus = 0 if shared or not plan.samples else count_engines(config) * config.cluster.rollout_num_gpus_per_engine
    return RecipePlan(
        parameters=parameter_count(spec),
        plan=plan,
        config=config,
        training=trainer + (engine + kv_cache if shared else 0),
        sampling=sampling if plan.samples else 0,
        offload=choice,
        host=_estimate_host(config, plan, spec, shares, hardware, optimizer if choice.offloads else 0),
        requests=requests,
        num_gpus=get_world_size(config) + own_gpus,
        usable=usable,
    )


def _add(shares: tuple[MemoryShare, ...], keeps: Any) -> int:
    return sum(share.bytes for share in shares if keeps(share.name))


def _count_requests(config: Config, plan: Plan, spec: DecoderSpec, free: int) -> int:
    """Sequences of full length in the KV cache, which takes a part of the free memory."""
    world = config.cluster.rollout_num_gpus_per_engine
    shard = shard_spec(spec, world) if world > 1 else spec
    dtype = plan.dtype if config.models.rollout_dtype == "auto" else config.models.rollout_dtype
    length = resolve_context_limit(config.rollout, spec.max_positions)
    each = length * kv_bytes_per_token(shard, dtype, config.models.numerics) + state_bytes_per_sequence(shard, dtype)
    fits = max(0, int(free * config.native.engine_memory_fraction)) // max(1, each)
    return min(fits, count_running_requests(config, plan.device, spec))


def _estimate_host(
    config: Config,
    plan: Plan,
    spec: DecoderSpec,
    shares: tuple[MemoryShare, ...],
    hardware: Hardware,
    optimizer: int,
) -> int:
    """Bytes of host memory of a node: what is offloaded of its ranks at all times, and its host copies for sampling."""
    parallel = replace(config.parallel, fsdp_cpu_offload=False)
    train = replace(config.train, optimizer_cpu_offload=False)
    on_gpu = estimate_memory(replace(config, parallel=parallel, train=train), plan, spec)
    offloaded = sum(share.bytes for share in on_gpu) - sum(share.bytes for share in shares)
    if plan.samples:
        offloaded += optimizer
    return offloaded * min(config.cluster.actor_num_gpus_per_node, max(1, hardware.gpus_per_node))


def _find_layout_problems(fit: RecipePlan, hardware: Hardware) -> Iterator[str]:
    """Why a plan is not for so many GPUs and nodes."""
    name = hardware.name
    if fit.num_gpus > hardware.num_gpus:
        yield f"it uses {fit.num_gpus} GPUs, but {name} has {hardware.num_gpus}"
    nodes = fit.config.cluster.actor_num_nodes
    if nodes > hardware.nodes or fit.config.cluster.actor_num_gpus_per_node > hardware.gpus_per_node:
        yield f"its trainer wants {nodes} nodes of {fit.config.cluster.actor_num_gpus_per_node} GPUs, unlike {name}"


def _find_memory_problems(fit: RecipePlan, hardware: Hardware) -> Iterator[str]:
    """Why a plan does not fit in the memory of its hardware."""
    name = hardware.name
    for phase, size in (("training", fit.training), ("sampling", fit.sampling)):
        if size > fit.usable:
            yield f"{phase} takes {size / 1e9:.0f} GB of a GPU, but {fit.usable / 1e9:.0f} GB of {name} are usable"
    wanted = min(MIN_REQUESTS, fit.plan.samples_per_step, fit.config.native.max_running)
    if fit.plan.samples and fit.requests < wanted:
        yield f"the KV cache has room for {fit.requests} sequences of full length, and {wanted} is the least"
    if fit.host > hardware.host_gb * 1e9:
        yield f"it offloads {fit.host / 1e9:.0f} GB to the host of a node, but {name} has {hardware.host_gb} GB"


# -- published shapes -----------------------------------------------------------------------


def use_published_shapes(config: Config, recipe: Recipe, scratch: Path) -> Config:
    """The config with a folder that has a config.json, written to ``scratch``, for each model that it names."""

    def write(name: str) -> str:
        shape = recipe.shape if name == recipe.model and recipe.shape is not None else name
        return str(write_published_config(shape, scratch))

    policies = {
        name: {key: write(str(value)) if key == "hf_checkpoint" else value for key, value in table.items()}
        for name, table in _iter_tables(config.multi_agent.policies)
    }
    names = [option.name for option in get_options(Config).values() if option.hub == "model"]
    models = {name for name in names if name in ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")}
    found = config
    for name in models:
        section = get_options(Config)[name].section
        value = getattr(getattr(config, section), name)
        if value is not None:
            found = replace(found, **{section: replace(getattr(found, section), **{name: write(value)})})
    return replace(found, multi_agent=replace(found.multi_agent, policies=policies)) if policies else found


def write_published_config(name: str, scratch: Path) -> Path:
    """A folder with the config.json of a published model."""
    known = find_known_config(name)
    if known is None:
        raise UsageError(f"{name} is not a published model that is known here; name its shape in [recipe].")
    folder = scratch / name.rpartition("/")[2]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"dtype": "bfloat16", **known}))
    return folder


def _iter_tables(policies: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((name, table) for name, table in policies.items() if isinstance(table, dict))


def format_gb(size: int) -> str:
    """A number of bytes in GB, rounded up."""
    return f"{ceil(size / 1e9)} GB"
