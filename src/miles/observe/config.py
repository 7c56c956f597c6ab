"""The knobs of what a run writes about itself and shows."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """What a run writes about itself and shows."""

    view: Literal["auto", "live", "plain", "none"] = knob(
        "auto", "What the terminal shows: live bars, plain lines, nothing, or live exactly when it is a terminal."
    )
    use_tensorboard: bool = knob(False, "Also write every metric for TensorBoard.")
    tb_dir: str | None = knob(
        None, "Where TensorBoard files go, instead of the folder tensorboard inside the run directory.", path=True
    )
    save_rollouts: bool = knob(
        True,
        "Write every step's trajectories, with their tokens and log-probs, to rollouts/step-*.parquet.",
        off="--disable-save-rollouts",
    )

    # -- debugging one plane without the other
    save_debug_rollout_data: str | None = knob(
        None,
        "Also write all of every step's groups to this file, in whose name {rollout_id} stands for the step.",
        path=True,
    )
    load_debug_rollout_data: str | None = knob(
        None,
        "Train on groups read from here and sample none: files as --save-debug-rollout-data names them, or a run.",
        path=True,
    )
    debug_rollout_only: bool = knob(
        False, "Make, score, filter and write down groups, and train nothing: no trainer and no optimizer is held."
    )
    debug_train_only: bool = knob(
        False, "Train on what --load-debug-rollout-data reads, without an engine; that flag alone says it as well."
    )
