"""Options of logging and display, and the file-name template of rollout dumps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.config.option import option

STEP_PLACEHOLDER = "rollout_id"
"""Name of the step placeholder in --save-debug-rollout-data and --load-debug-rollout-data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Console view, TensorBoard, recorded rollouts and debug runs."""

    view: Literal["auto", "live", "plain", "none"] = option(
        "auto", "What the terminal shows: live bars, plain lines, nothing, or live exactly when it is a terminal."
    )
    use_tensorboard: bool = option(False, "Also write every metric for TensorBoard.")
    tb_dir: str | None = option(
        None, "Where TensorBoard files go, instead of the folder tensorboard inside the run directory.", path=True
    )
    save_rollouts: bool = option(
        True,
        "Write every step's trajectories, with their tokens and log-probs, to rollouts/step-*.parquet.",
        off="--disable-save-rollouts",
    )
    keep_rollouts: int | None = option(
        None,
        "Number of most recent steps whose rollout files to keep, counted up to the newest checkpoint; all when not "
        "given.",
        unit="steps",
        ge=1,
    )

    # -- debugging one plane without the other
    save_debug_rollout_data: str | None = option(
        None,
        "Also write all of every step's groups to this file, in whose name {rollout_id} stands for the step.",
        path=True,
    )
    load_debug_rollout_data: str | None = option(
        None,
        "Train on groups read from here and sample none: files as --save-debug-rollout-data names them, or a run.",
        path=True,
    )
    debug_rollout_only: bool = option(
        False, "Make, score, filter and write down groups, and train nothing: no trainer and no optimizer is held."
    )
    debug_train_only: bool = option(
        False, "Train on what --load-debug-rollout-data reads, without an engine; that flag alone says it as well."
    )


def format_step_path(template: str, step: int) -> Path:
    """Return the file of a step; ValueError if the template has other placeholders than the step's.

    >>> format_step_path("dumps/{rollout_id:03d}.parquet", 7).name
    '007.parquet'
    """
    try:
        return Path(template.format(**{STEP_PLACEHOLDER: step}))
    except (KeyError, IndexError, AttributeError) as error:
        raise ValueError(f"{error} is not known") from error
