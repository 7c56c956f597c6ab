"""What a plan says of several policies: whose weights each has, how it learns, and what its own cost."""

from collections.abc import Sequence
from typing import Any

from miles.config.help import shown
from miles.launch.config import Config
from miles.launch.found import spec_or_none
from miles.launch.members import Member, members_of
from miles.launch.memory import shares_of, sized
from miles.launch.plan import plan_of
from miles.models.footprint import parameter_count


def policy_rows(config: Config) -> list[dict[str, Any]]:
    """One entry a policy, the main one first, for programs; none where the run names no policies."""
    if not config.cast.policies:
        return []
    return [_row(member) for member in members_of(config)]


def policy_lines(config: Config) -> list[str]:
    """The same for people."""
    rows = policy_rows(config)
    wide = max((len(row["name"]) for row in rows), default=0)
    return [f"{row['name'].ljust(wide)}  {_words(row, rows)}" for row in rows]


def _row(member: Member) -> dict[str, Any]:
    config = member.config
    row: dict[str, Any] = {"name": member.name, "weights": member.weights, "frozen": member.frozen}
    row |= {"train_every": member.train_every, "given": dict(sorted((k, _value(config, k)) for k in member.given))}
    if not member.apart:
        return row
    spec = spec_or_none(config.models.hf_checkpoint, config.models.model_impl)
    assert spec is not None, "a plan is shown of a config that breaks no rule"
    held = sum(share.bytes for share in shares_of(config, plan_of(config), spec))
    return row | {
        "hf_checkpoint": config.models.hf_checkpoint,
        "parameters": parameter_count(spec),
        "bytes": held,
        "lr": config.train.lr,
        "advantage_estimator": config.algo.advantage_estimator,
    }


def _value(config: Config, name: str) -> Any:
    rooms = (config.models, config.rollout, config.algo, config.train, config.native)
    return next(getattr(room, name) for room in rooms if name in type(room).__dataclass_fields__)


def _words(row: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    own = ", ".join(f"{name} {shown(value)}" for name, value in row["given"].items() if name != "hf_checkpoint")
    tail = f"; its own: {own}" if own else ""
    if row["weights"] != row["name"]:
        return f"the weights of {row['weights']}{tail}"
    size = f"{row['hf_checkpoint']}, {row['parameters'] / 1e6:,.2f}M parameters"
    if row["frozen"]:
        return f"{size}, frozen{tail}"
    steps = "every step" if row["train_every"] == 1 else f"every {row['train_every']} steps on all their rows"
    first = " (the main one: its numbers are below)" if row is rows[0] else f", about {sized(row['bytes'])}"
    return f"{size}, {row['advantage_estimator']} at lr {shown(row['lr'])} {steps}{first}{tail}"
