"""Options of logging and display, and the file-name template of rollout dumps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miles.config.option import option

STEP_PLACEHOLDER = "rollout_id"
"""Name of the step placeholder in --save-debug-rollout-data and --load-debug-rollout-data."""
METRICS_TOKEN = "MILES_API_KEY"
"""Environment variable with the token that a request for --metrics-port must send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObserveConfig:
    """Console view, dashboard, experiment trackers, recorded rollouts and debug runs."""

    view: Literal["auto", "live", "plain", "none"] = option(
        "auto", "What the terminal shows: live bars, plain lines, nothing, or live exactly when it is a terminal."
    )
    dashboard: bool = option(
        False, "Start the dashboard, as miles view does, beside the run and print its address; it ends with the run."
    )
    dashboard_bind_host: str = option(
        "127.0.0.1", "Address the dashboard listens on; on any other than loopback a token is needed, which is printed."
    )
    dashboard_bind_port: int = option(0, "Port of the dashboard; 0 picks a free one, which is printed.", ge=0, le=65535)
    use_tensorboard: bool = option(False, "Also write every metric for TensorBoard.")
    tb_dir: str | None = option(
        None, "Where TensorBoard files go, instead of the folder tensorboard inside the run directory.", path=True
    )
    tb_project_name: str | None = option(
        None, "Folder of the TensorBoard files of several runs, each in its own --tb-experiment-name.", path=True
    )
    tb_experiment_name: str | None = option(
        None, "Folder of this run inside --tb-project-name; the name of the run directory when not given."
    )

    # -- Weights & Biases, MLflow and Trackio
    use_wandb: bool = option(False, "Also log every metric to Weights & Biases.")
    wandb_project: str | None = option(None, "Project of Weights & Biases; miles when not given.")
    wandb_group: str | None = option(None, "Group of Weights & Biases, and the first part of the run's name there.")
    wandb_team: str | None = option(None, "Team (entity) of Weights & Biases; the account's default when not given.")
    wandb_host: str | None = option(None, "URL of a Weights & Biases server of your own.")
    wandb_mode: Literal["online", "offline", "disabled", "shared"] | None = option(
        None, "Mode of Weights & Biases; offline writes files for wandb sync, without a network."
    )
    wandb_dir: str | None = option(
        None, "Where Weights & Biases keeps its files, instead of the folder wandb inside the run directory.", path=True
    )
    wandb_run_id: str | None = option(None, "Run of Weights & Biases to continue, instead of a new one.")
    wandb_random_suffix: bool = option(
        True,
        "End the group's name with random letters, so that no two runs share it.",
        off="--disable-wandb-random-suffix",
    )
    wandb_always_use_train_step: bool = option(
        False, "Count optimizer steps on the horizontal axis of Weights & Biases, instead of rollout steps."
    )
    wandb_key: str | None = option(
        None,
        "API key of Weights & Biases, never written down; other users of the machine can read a command line, so "
        "prefer the environment variable WANDB_API_KEY.",
        secret=True,
    )
    use_mlflow: bool = option(False, "Also log every metric to MLflow.")
    mlflow_tracking_uri: str | None = option(
        None, "URL of the MLflow server or database; MLFLOW_TRACKING_URI or MLflow's own default when not given."
    )
    mlflow_experiment_name: str | None = option(None, "Experiment of MLflow; miles when not given.")
    mlflow_run_name: str | None = option(
        None, "Name of the run in MLflow; the name of the run directory when not given."
    )
    mlflow_run_id: str | None = option(None, "Run of MLflow to continue, instead of a new one.")
    use_trackio: bool = option(False, "Also log every metric to Trackio.")
    trackio_project: str | None = option(None, "Project of Trackio; miles when not given.")
    trackio_run_name: str | None = option(
        None, "Name of the run in Trackio; the name of the run directory and random letters when not given."
    )
    trackio_dir: str | None = option(
        None, "Folder of Trackio's local database; TRACKIO_DIR or Trackio's own default when not given.", path=True
    )
    trackio_server_url: str | None = option(
        None, "URL of a Trackio server of your own, whose write token is in TRACKIO_WRITE_TOKEN."
    )
    trackio_space_id: str | None = option(None, "Hugging Face Space to log to with Trackio, made if it does not exist.")

    # -- Prometheus and OpenTelemetry
    use_prometheus: bool = option(False, "Serve every metric to Prometheus, on --metrics-port or 9090.")
    metrics_port: int | None = option(
        None,
        "Port on which /metrics serves every metric to Prometheus; 0 picks a free one, which is printed.",
        aliases=("--prometheus-port",),
        ge=0,
        le=65535,
    )
    metrics_host: str = option(
        "127.0.0.1", "Address of --metrics-port; any other than loopback needs a token, in MILES_API_KEY."
    )
    prometheus_run_name: str | None = option(
        None, "Label run_name of the metrics of Prometheus; the name of the run directory when not given."
    )
    otlp_endpoint: str | None = option(
        None,
        "URL of an OpenTelemetry receiver (OTLP over HTTP) for all metrics and the spans of trace/; "
        "OTEL_EXPORTER_OTLP_HEADERS may hold a key.",
    )

    # -- all trackers
    tracker_samples: int = option(
        0,
        "Number of a step's trajectories, with prompt and response, that trackers get as a table; 0 for none.",
        unit="trajectories",
        ge=0,
        le=1000,
    )
    tracker_samples_interval: int = option(
        10, "Number of steps from one table of --tracker-samples to the next.", unit="steps", ge=1
    )

    log_correct_samples: bool = option(
        False, "Also report the share and the response length of trajectories with a reward of at least 1."
    )
    save_rollouts: bool = option(
        True,
        "Write every step's trajectories, with their tokens and log-probs, to rollouts/step-*.parquet.",
        off="--disable-save-rollouts",
    )
    save_trainer_logprobs: bool = option(
        True,
        "Write the trainer's log-prob and entropy of each trained token to rollouts/trainer/step-*.parquet.",
        off="--disable-save-trainer-logprobs",
    )
    keep_rollouts: int | None = option(
        None,
        "Number of most recent steps whose rollout files to keep, counted up to the newest checkpoint; all when not "
        "given.",
        unit="steps",
        ge=1,
    )

    # -- traces
    mfu_peak_tflops: float | None = option(
        None,
        "TFLOP/s that a device can reach, for the model FLOPs utilisation; that of its data sheet when not given.",
        gt=0,
    )
    gauge_interval: float = option(
        1.0,
        "Seconds between samples of engine gauges and GPU counters in trace/engines.json; 0 takes none.",
        unit="seconds",
        ge=0,
    )
    trace_max_mb: int = option(
        64,
        "Megabytes after which trace/groups.json and trace/engines.json start anew; the previous file of each is kept.",
        unit="MB",
        ge=1,
    )

    # -- profiles
    use_pytorch_profiler: bool = option(
        False, "Write PyTorch profiles of the steps from --profile-step-start on to the folder profiles of the run."
    )
    profile_target: tuple[Literal["train_overall", "train_actor", "train_log_probs", "rollout"], ...] = option(
        ("train_overall",),
        "What is profiled: the training step, its optimizer steps or its log-probs alone, or the engine's rollout.",
    )
    profile_step_start: int = option(10, "First step that is profiled.", unit="step", ge=1)
    profile_step_end: int = option(12, "Step before which profiling ends.", unit="step", ge=2)
    record_memory_history: bool = option(
        False, "Record every allocation on the accelerator, and write memory snapshots of the training step."
    )
    memory_snapshot_dir: str | None = option(
        None, "Where memory snapshots go, instead of the folder profiles of the run.", path=True
    )
    memory_snapshot_num_steps: int = option(
        1, "Steps between two memory snapshots; there is another one when memory runs out.", unit="steps", ge=1
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
    load_debug_rollout_data_subsample: float | None = option(
        None,
        "Share of the recorded groups of every step to train on, the first ones; --rollout-batch-size is their number.",
        gt=0,
        le=1,
    )
    save_debug_train_data: str | None = option(
        None,
        "Also write the training samples of every step, with masks and advantages, to this file of torch.save, in "
        "whose name {rollout_id} stands for the step.",
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
