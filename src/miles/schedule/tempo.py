"""Knobs of tempo: how much is under way at once, what is cut short and what becomes of it, what new weights do."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class TempoConfig:
    """How the rollout plane is kept busy."""

    over_sampling_batch_size: int | None = knob(
        None,
        "Prompts that enter each step, of which the first --rollout-batch-size to be answered are trained on and the "
        "rest is cut; without it only those enter that are trained on.",
        unit="prompts",
    )
    partial_rollout: bool = knob(
        False, "Attempts that were cut go on in the next step, under its weights, instead of being dropped."
    )
    mask_offpolicy_in_partial_rollout: bool = knob(
        False, "Train only on those tokens of an attempt that the newest of the weights that wrote it have written."
    )
    async_max_concurrent_samples: int | None = knob(
        None, "Most attempts under way at once; without it as many as the staleness budget lets in.", unit="attempts"
    )
    rollout_submission_granularity: Literal["group", "sample"] = knob(
        "group",
        "With --async-max-concurrent-samples, whether all attempts at a prompt enter together or each by itself.",
    )
    adaptive_concurrency: bool = knob(
        False,
        "Let fewer attempts in while the engine runs out of room for their keys and values, and more again after.",
    )
    pause_generation_mode: Literal["in_place", "retract", "abort"] = knob(
        "in_place",
        "What new weights do to attempts under way: they go on with the keys and values they have, compute these anew, "
        "or end and are asked for again from where they were.",
    )
