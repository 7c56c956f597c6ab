"""Policies in ``miles plan``: the weights, training, memory, ranks and engines of each."""

from collections.abc import Mapping, Sequence
from typing import Any

from miles.cluster.ray.placement import ResourceRequest
from miles.config.schema import get_options
from miles.config.value_types import format_value
from miles.launch.config import Config
from miles.launch.plan.hardware import choose_device
from miles.launch.plan.memory import estimate_memory, format_bytes
from miles.launch.plan.plan import build_plan
from miles.launch.plan.topology import count_engines, get_parallel_sizes, is_remote, uses_ray
from miles.launch.policies.config import PolicyConfig, get_policies
from miles.launch.policies.placement import PolicyPlacement, build_resource_requests, place_policies
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.params import parameter_count


def describe_policies(config: Config) -> list[dict[str, Any]]:
    """One entry per policy, the main one first; none where the run names no policies."""
    if not config.multi_agent.policies:
        return []
    policies = get_policies(config)
    placements = place_policies(policies)
    requests = build_resource_requests(config, policies) if uses_ray(config) else {}
    return [_describe_policy(p, placements.get(p.name), requests.get(p.name)) for p in policies]


def format_policies(config: Config) -> list[str]:
    """The same as text."""
    rows = describe_policies(config)
    width = max((len(row["name"]) for row in rows), default=0)
    lines: list[str] = []
    for row in rows:
        lines.append(f"{row['name'].ljust(width)}  {_format_policy(row, rows)}")
        lines += [f"{' ' * width}  {line}" for line in _format_placement(row)]
    return lines


def _describe_policy(
    policy: PolicyConfig, placement: PolicyPlacement | None, request: ResourceRequest | None
) -> dict[str, Any]:
    config = policy.config
    row: dict[str, Any] = {"name": policy.name, "weights": policy.weights, "frozen": policy.frozen}
    row |= {
        "train_every": policy.train_every,
        "own_options": dict(sorted((k, _get_value(config, k)) for k in policy.own_options)),
    }
    if not policy.owns_weights:
        return row
    spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    assert spec is not None and placement is not None, "the config has passed the rules"
    size = sum(share.bytes for share in estimate_memory(config, build_plan(config), spec))
    return (
        row
        | _describe_placement(config, placement, request)
        | {
            "hf_checkpoint": config.models.hf_checkpoint,
            "parameters": parameter_count(spec),
            "bytes": size,
            "lr": config.train.lr,
            "advantage_estimator": config.algo.advantage_estimator,
        }
    )


def _describe_placement(config: Config, placement: PolicyPlacement, request: ResourceRequest | None) -> dict[str, Any]:
    """The ranks and engines, with their devices unless a Ray cluster assigns these."""
    addresses = config.sglang.rollout_external_engine_addrs
    remote = is_remote(config)
    found: dict[str, Any] = {
        "train_backend": config.train.train_backend,
        "ranks": len(placement.ranks),
        "detached": placement.detached,
        "layout": get_parallel_sizes(config),
        "engines": len(addresses) or (count_engines(config) if remote else 1),
        "engine_backend": config.sglang.rollout_backend,
        "engine_size": config.cluster.rollout_num_gpus_per_engine,
    }
    if request is not None:
        return found | {"cluster": request.describe(has_driver=not placement.detached)}
    on_gpus = choose_device(config.cluster.device).name != "cpu"
    return found | {
        "rank_devices": list(placement.ranks) if on_gpus else [],
        "engine_devices": list(placement.engines) if on_gpus else [],
    }


def _format_placement(row: Mapping[str, Any]) -> list[str]:
    """Where the ranks and the engines of a policy with its own weights are."""
    if "ranks" not in row:
        return []
    layout = "".join(f", {flag.removeprefix('--').replace('-', '_')} {size}" for flag, size in row["layout"].items())
    ranks = f"{row['ranks']} {'rank' if row['ranks'] == 1 else 'ranks'} of {row['train_backend']}{layout}"
    where = "processes of their own" if row["detached"] else "this process"
    if row["ranks"] > 1 and not row["detached"]:
        where = "this process and others"
    trainer = "no trainer" if not row["ranks"] else f"{ranks}, in {where}{_format_devices(row, 'rank_devices')}"
    kind = {"native": "native engine in this process", "served": "miles serve", "sglang": "stock SGLang"}
    engine = kind[row["engine_backend"]]
    if row["engine_backend"] != "native":
        engine = f"{row['engines']} × {engine}"
    size = f", {row['engine_size']} devices each" if row["engine_size"] > 1 else ""
    return [trainer, f"{engine}{size}{_format_devices(row, 'engine_devices')}", *row.get("cluster", ())]


def _format_devices(row: Mapping[str, Any], key: str) -> str:
    devices = row.get(key)
    if not devices:
        return ""
    return f", GPU {devices[0]}" if len(devices) == 1 else f", GPUs {devices[0]} to {devices[-1]}"


def _get_value(config: Config, name: str) -> Any:
    return getattr(getattr(config, get_options(Config)[name].section), name)


def _format_policy(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    own = ", ".join(
        f"{name} {format_value(value)}" for name, value in row["own_options"].items() if name != "hf_checkpoint"
    )
    tail = f"; own options: {own}" if own else ""
    if row["weights"] != row["name"]:
        return f"the weights of {row['weights']}{tail}"
    size = f"{row['hf_checkpoint']}, {row['parameters'] / 1e6:,.2f}M parameters"
    if row["frozen"]:
        return f"{size}, frozen{tail}"
    steps = (
        "every step" if row["train_every"] == 1 else f"every {row['train_every']} steps on the samples of all of them"
    )
    first = " (the main policy, see below)" if row is rows[0] else f", about {format_bytes(row['bytes'])}"
    return f"{size}, {row['advantage_estimator']} at lr {format_value(row['lr'])} {steps}{first}{tail}"
