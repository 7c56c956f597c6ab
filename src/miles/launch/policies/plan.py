"""Policies in ``miles plan``: the weights, training and memory of each."""

from collections.abc import Sequence
from typing import Any

from miles.config.schema import get_options
from miles.config.value_types import format_value
from miles.launch.config import Config
from miles.launch.plan.memory import estimate_memory, format_bytes
from miles.launch.plan.plan import build_plan
from miles.launch.policies.config import PolicyConfig, get_policies
from miles.launch.rules.paths import read_spec_or_none
from miles.models.accounting.params import parameter_count


def describe_policies(config: Config) -> list[dict[str, Any]]:
    """One entry per policy, the main one first; none where the run names no policies."""
    if not config.multi_agent.policies:
        return []
    return [_describe_policy(policy) for policy in get_policies(config)]


def format_policies(config: Config) -> list[str]:
    """The same as text."""
    rows = describe_policies(config)
    width = max((len(row["name"]) for row in rows), default=0)
    return [f"{row['name'].ljust(width)}  {_format_policy(row, rows)}" for row in rows]


def _describe_policy(policy: PolicyConfig) -> dict[str, Any]:
    config = policy.config
    row: dict[str, Any] = {"name": policy.name, "weights": policy.weights, "frozen": policy.frozen}
    row |= {
        "train_every": policy.train_every,
        "own_options": dict(sorted((k, _get_value(config, k)) for k in policy.own_options)),
    }
    if not policy.owns_weights:
        return row
    spec = read_spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    assert spec is not None, "the config has passed the rules"
    size = sum(share.bytes for share in estimate_memory(config, build_plan(config), spec))
    return row | {
        "hf_checkpoint": config.models.hf_checkpoint,
        "parameters": parameter_count(spec),
        "bytes": size,
        "lr": config.train.lr,
        "advantage_estimator": config.algo.advantage_estimator,
    }


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
