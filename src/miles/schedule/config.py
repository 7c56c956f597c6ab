"""Options of the training loop: steps, staleness, saving, evaluation, asynchronous rollout, elasticity."""

from dataclasses import dataclass
from typing import Literal

from miles.config.option import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Length of the run, staleness, checkpoints, evaluation interval, parity thresholds and timeouts."""

    num_rollout: int | None = option(None, "Number of training steps of the run.", unit="steps", ge=1)
    num_epoch: int | None = option(
        None, "Number of passes over the prompts, instead of --num-rollout.", unit="epochs", ge=1
    )
    debug_exit_after_rollout: int | None = option(
        None,
        "Save and end the command after this many steps of its own; the schedule is still that of the whole run.",
        unit="steps",
        ge=1,
    )
    max_weight_staleness: int = option(
        0, "Maximum age, in weight versions, of a token when it is trained on; 0 is on-policy.", unit="versions", ge=0
    )
    colocate: bool = option(
        False, "Trainer and engines share the devices and take turns, also with --rollout-num-gpus."
    )
    offload_rollout: bool | None = option(
        None,
        "Release the engines' memory while the trainer works; when not given, exactly where both take turns on the "
        "same devices.",
    )
    reorder_window: int = option(
        1, "Number of finished groups that may overtake an unfinished one; 1 keeps strict order.", unit="groups", ge=1
    )
    save: str | None = option(
        None, "Run directory; when not given, a directory under runs/ named after the checkpoint.", path=True
    )
    load: str | None = option(None, "Run directory or checkpoint to load weights and optimizer state from.", path=True)
    save_interval: int | None = option(
        None, "Steps between checkpoints; when not given, only the end of the run is saved.", unit="steps", ge=1
    )
    keep_checkpoints: int | None = option(
        None, "Number of most recent checkpoints to keep; all when not given.", unit="checkpoints", ge=1
    )
    save_failure: Literal["stop", "warn"] = option(
        "stop",
        "What a failed checkpoint save does: stop the run or warn; the last save of a run always stops it.",
    )
    save_hf: str | None = option(
        None,
        "Also write the model of every checkpoint, without the optimizer, to this folder, in whose name {rollout_id} "
        "stands for the step.",
        path=True,
    )
    save_hf_precision: Literal["wide", "rollout"] = option(
        "wide",
        "Precision of --save-hf: wide is the checkpoint's own, rollout quantizes as the engine's weights are "
        "(--rollout-precision), for serving.",
    )
    eval_interval: int | None = option(None, "Steps between evaluations.", unit="steps", ge=1)
    parity_tolerance: float | None = option(
        None,
        "Mean |Δ log-prob| between engine and trainer above which the parity light is red; 0.01 by default, and 0.05 "
        "or 0.2 with a --rollout-precision of 8 or 4 bits that is not trained in.",
        unit="nats",
        gt=0,
    )
    parity_stop: float | None = option(
        None, "Mean |Δ log-prob| between engine and trainer above which the run stops.", unit="nats", gt=0
    )
    parity_no_replay_interval: int = option(
        10,
        "With --use-rollout-routing-replay, steps between measurements of one micro-batch without replay, to "
        "show its effect; 0 for never.",
        unit="steps",
        ge=0,
    )
    stall_timeout: float = option(
        1800.0,
        "Seconds a step may wait for its next group before the run stops and lists the groups in flight.",
        unit="s",
        gt=0,
    )
    max_dropped_groups: int = option(
        1000, "Number of consecutive groups that filters may drop before the run stops.", unit="groups", ge=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncRolloutConfig:
    """Over-sampling, partial rollout, and concurrency of generation."""

    over_sampling_batch_size: int | None = option(
        None,
        "Prompts admitted per step, of which the first --rollout-batch-size to finish are trained on and the "
        "rest are aborted; when not given, no more than are trained on.",
        unit="prompts",
        ge=1,
    )
    partial_rollout: bool = option(
        False, "Resume aborted trajectories in the next step, under its weights, instead of dropping them."
    )
    mask_offpolicy_in_partial_rollout: bool = option(
        False, "Train only on the tokens of a trajectory that the newest weights sampled."
    )
    async_max_concurrent_samples: int | None = option(
        None,
        "Maximum number of trajectories in flight; when not given, as many as the staleness bound admits.",
        unit="trajectories",
        ge=1,
    )
    rollout_submission_granularity: Literal["group", "sample"] = option(
        "group",
        "With --async-max-concurrent-samples, whether all trajectories of a prompt start together or each by itself.",
    )
    adaptive_concurrency: bool = option(
        False,
        "Reduce the number of trajectories in flight while the engine's KV cache is full, and raise it again "
        "afterwards.",
    )
    pause_generation_mode: Literal["in_place", "retract", "abort"] = option(
        "in_place",
        "What a weight update does to in-flight requests: in_place keeps their KV cache, retract recomputes "
        "it, abort ends and resubmits them from where they were.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticConfig:
    """Moving GPUs between trainer and engines during a run."""

    elastic: bool = option(False, "Move devices between trainer and engines, to the plane that the other waits for.")
    elastic_min_engines: int = option(1, "Minimum number of engines under --elastic.", unit="engines", ge=1)
    elastic_min_ranks: int = option(1, "Minimum number of training ranks under --elastic.", unit="ranks", ge=1)
    elastic_patience: int = option(
        3,
        "Number of consecutive versions in which one plane must wait for the other before a device moves.",
        unit="versions",
        ge=1,
    )
