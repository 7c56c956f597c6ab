"""Knobs of time: how many steps, how far planes may drift, when to save, evaluate and stop."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """When to generate, train, publish, evaluate and save."""

    num_rollout: int | None = knob(None, "How many training steps the run takes.", unit="steps")
    num_epoch: int | None = knob(
        None, "How often the prompts are read through, instead of --num-rollout.", unit="epochs"
    )
    max_weight_staleness: int = knob(
        0, "How many versions old a token may be when it is trained on; 0 is on-policy.", unit="versions"
    )
    colocate: bool = knob(False, "The planes share the device and take turns, so neither runs ahead.")
    shelf_window: int = knob(
        1, "How many finished groups may overtake an unfinished one; 1 keeps strict order.", unit="groups"
    )
    save: str | None = knob(
        None, "The run's directory; without it the run goes under runs/ by its checkpoint's name.", path=True
    )
    load: str | None = knob(None, "A run or checkpoint folder to start from, weights and optimizer.", path=True)
    save_interval: int | None = knob(
        None, "How many steps lie between checkpoints; without it only the end is saved.", unit="steps"
    )
    keep_checkpoints: int | None = knob(
        None, "How many of the newest checkpoints are kept; without it all are.", unit="checkpoints"
    )
    save_failure: Literal["stop", "warn"] = knob(
        "stop",
        "What a checkpoint that cannot be written does to the run; the last one stops it in any case.",
    )
    eval_interval: int | None = knob(None, "How many steps lie between evaluations.", unit="steps")
    parity_tolerance: float = knob(
        0.01, "Mean |Δ log-prob| between engine and trainer above which the parity light is red.", unit="nats"
    )
    parity_stop: float | None = knob(
        None, "Mean |Δ log-prob| between engine and trainer above which the run stops.", unit="nats"
    )
    parity_no_replay_interval: int = knob(
        10,
        "With --use-rollout-routing-replay, every so many steps one micro-batch is read once more without it, to show "
        "what replay is worth; 0 for never.",
        unit="steps",
    )
    stall_timeout: float = knob(
        1800.0, "How long a step may wait for its next group before the run ends and names who it waits for.", unit="s"
    )
    max_dropped_groups: int = knob(
        1000, "How many groups in a row the dynamic sampling filter may drop before the run ends.", unit="groups"
    )
