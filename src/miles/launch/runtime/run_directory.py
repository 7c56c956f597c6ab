"""Run directory: locked by one process at a time, and resumed only with the options it was started with."""

from __future__ import annotations

import fcntl
import os
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from miles.backends.megatron.config import drop_layout_flags
from miles.config.cli import parse
from miles.config.provenance import flatten_values, to_toml
from miles.core.errors import ResumeError, StorageError, storage_errors
from miles.launch.config import Config
from miles.launch.hub.resolve import describe_names
from miles.schedule.checkpoints import CheckpointDirectory, Cursor

_LOCK = "lock"
# The suffix of a file that is being written; what a killed process left is overwritten.
_PART = ".part"

MAY_CHANGE = frozenset(
    [
        "num_rollout",
        "num_epoch",
        "save",
        "load",
        "save_interval",
        "keep_checkpoints",
        "eval_interval",
        "async_save",
        "ckpt_format",
        "verify_checkpoints",
        "save_failure",
        "stall_timeout",
        "save_hf",
        "save_hf_precision",
        "debug_exit_after_rollout",
        "offload",
        "offload_rollout",
        "train_env_vars",
        "view",
        "dashboard",
        "dashboard_bind_host",
        "dashboard_bind_port",
        "use_tensorboard",
        "tb_dir",
        "tb_project_name",
        "tb_experiment_name",
        "use_wandb",
        "wandb_project",
        "wandb_group",
        "wandb_team",
        "wandb_host",
        "wandb_mode",
        "wandb_dir",
        "wandb_run_id",
        "wandb_random_suffix",
        "wandb_always_use_train_step",
        "use_mlflow",
        "mlflow_tracking_uri",
        "mlflow_experiment_name",
        "mlflow_run_name",
        "mlflow_run_id",
        "use_trackio",
        "trackio_project",
        "trackio_run_name",
        "trackio_dir",
        "trackio_server_url",
        "trackio_space_id",
        "use_prometheus",
        "metrics_port",
        "metrics_host",
        "prometheus_run_name",
        "otlp_endpoint",
        "tracker_samples",
        "tracker_samples_interval",
        "custom_tracker_path",
        "save_rollouts",
        "keep_rollouts",
        "save_trainer_logprobs",
        "gauge_interval",
        "trace_max_mb",
        "mfu_peak_tflops",
        "use_pytorch_profiler",
        "profile_target",
        "profile_step_start",
        "profile_step_end",
        "record_memory_history",
        "memory_snapshot_dir",
        "memory_snapshot_num_steps",
        "num_threads",
        "save_debug_rollout_data",
        "save_debug_train_data",
        "log_correct_samples",
        "session_audit",
        "session_server_host",
        "session_server_port",
        "session_server_api_key_file",
        "session_server_advertise_host",
        "session_server_ssl_certfile",
        "session_server_ssl_keyfile",
        "parity_tolerance",
        "parity_stop",
        "parity_no_replay_interval",
        "max_dropped_groups",
        "skip_bad_rows",
        "check_rows",
        "reward_timeout",
        "max_reward_failures",
        "allow_duplicate_samples",
        "grade_workers",
        "rm_url",
        "rm_token_env",
        "rm_batch_size",
        "rm_concurrency",
        "rm_retries",
        "rm_request_timeout",
        "reward_model_url",
        "reward_model_token_env",
        "judge_url",
        "judge_token_env",
        "reward_num_workers",
        "reward_worker_concurrency",
        "train_backend",
        "actor_num_nodes",
        "actor_num_gpus_per_node",
        "tensor_model_parallel_size",
        "sequence_parallel",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
        "pipeline_model_parallel_size",
        "data_parallel_replicate_size",
        "distributed_timeout_minutes",
        "fsdp_cpu_offload",
        "optimizer_cpu_offload",
        "max_tokens_per_gpu",
        "max_patches_per_gpu",
        "engine_memory_fraction",
        "engine_kv_tokens",
        "engine_vision_cache_mib",
        "gradient_checkpointing",
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "offload_train",
        "rollout_num_engines",
        "rollout_external_engine_addrs",
        "rollout_engine_token_env",
        "sglang_python",
        "update_weight_transport",
        "update_weight_buffer_size",
        "update_weight_timeout",
        "check_weight_update_equal",
        "rollout_start_timeout",
        "rollout_health_check_interval",
        "rollout_health_check_timeout",
        "rollout_health_check_first_wait",
        "max_restarts",
        "trainer_max_restarts",
        "heartbeat_timeout",
        "slow_rank_factor",
        "elastic",
        "elastic_min_engines",
        "elastic_min_ranks",
        "elastic_patience",
        "rollout_max_restarts",
        "runtime",
        "ray_address",
        "ray_placement_timeout",
        "push_to_hub",
        "hub_private",
        "hub_revision",
        "save_remote",
    ]
)
"""Options that a resumed run may change: they do not affect what is learned."""


_MEGATRON_FLAGS = "megatron_flags"
# What a process leaves behind that was killed, or could not write, before the directory was a run; data given to the
# library in memory is written before.
_OWN_FILES = ("lock", "config.part", "data")
_RESTORE_CONFIG = (
    "restore it from a copy, or start a new run from the newest checkpoint of this one with --hf-checkpoint and "
    "another --save"
)


class RunDirectory:
    """``runs/<name>/``: config.toml, events.jsonl, metrics.jsonl, rollouts/, checkpoints/, logs/."""

    def __init__(
        self, path: Path, *, keep_checkpoints: int | None = None, background: bool = False, forgiving: bool = False
    ) -> None:
        self.path = path
        self.checkpoints = CheckpointDirectory(
            path / "checkpoints", keep=keep_checkpoints, background=background, forgiving=forgiving
        )
        self.rescheduled = False
        self._lock: IO[str] | None = None

    def claim(self, config: Config, origins: Mapping[str, str]) -> tuple[Path, Cursor] | None:
        """Lock the directory for this process; returns the checkpoint to resume from, None for a new run.

        ``rescheduled`` then says whether a resumed run has other options than it had: it still learns exactly the same,
        but its log need not repeat line by line.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire_lock()
        except OSError as error:
            raise StorageError(
                f"the run directory {self.path} cannot be used: {error.strerror}; name another with --save, or restore "
                "access to it"
            ) from error
        with storage_errors(self.path):
            return self._resume_or_start(config, origins)

    def _resume_or_start(self, config: Config, origins: Mapping[str, str]) -> tuple[Path, Cursor] | None:
        written = self.path / "config.toml"
        if written.exists():
            differences = self._find_differences(read_run_config(self.path), config)
            if differences.keys() - MAY_CHANGE and self.checkpoints.latest() is not None:
                raise ResumeError(self._describe_refusal(differences))
            self.rescheduled = bool(differences)
        elif any(p.name not in _OWN_FILES for p in self.path.iterdir()):
            raise ResumeError(f"{self.path} is not empty and is not a run; name another directory with --save")
        write_atomically(written, to_toml(describe_names(config), origins))
        return self.checkpoints.latest()

    def release(self) -> None:
        if self._lock is not None:
            with suppress(OSError):  # it holds only the process id
                self._lock.close()
            self._lock = None

    def _acquire_lock(self) -> None:
        self._lock = lock = (self.path / _LOCK).open("a+", encoding="utf-8", errors="replace")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ResumeError(
                f"process {lock.read().strip() or 'unknown'} is running {self.path} now; wait for it, or name another "
                "directory with --save"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()

    def _find_differences(self, stored: Mapping[str, Any], config: Config) -> dict[str, str]:
        """A phrase for each option that differs from the stored config; options it does not have had their default."""
        default = parse(Config, ()).config
        assert default is not None, "every option has a default"
        before, now = _flatten(default) | _merge_sections(stored), _flatten(config)
        for values in (before, now):
            values[_MEGATRON_FLAGS] = list(drop_layout_flags(values.get(_MEGATRON_FLAGS, ())))
        return {
            name: f"{name} was {before.get(name, 'unset')!r} and is now {now.get(name, 'unset')!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        }

    def _describe_refusal(self, differences: Mapping[str, str]) -> str:
        changed = "; ".join(sentence for name, sentence in differences.items() if name not in MAY_CHANGE)
        newest = self.checkpoints.latest()
        weights = newest[0] if newest else self.path
        return (
            f"{self.path} is a run with other options: {changed}; use the values it was started with, or start a new "
            f"run from its weights with --hf-checkpoint {weights} --save NEW"
        )


def read_run_config(run: Path) -> dict[str, dict[str, Any]]:
    """The sections of a run's ``config.toml``; ResumeError if it is damaged."""
    path = run / "config.toml"
    try:
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:  # also invalid UTF-8
        raise ResumeError(f"{path} is damaged ({error}); {_RESTORE_CONFIG}") from error
    if not all(isinstance(section, dict) for section in sections.values()):
        raise ResumeError(f"{path} is damaged (it has options outside of sections); {_RESTORE_CONFIG}")
    return sections


def _flatten(config: Config) -> dict[str, Any]:
    """Every option that is set, as a file has it."""
    config = describe_names(config)
    return _merge_sections(tomllib.loads(to_toml(config, dict.fromkeys(flatten_values(config), "now"))))


def _merge_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for section in sections.values() for name, value in section.items()}


def write_atomically(path: Path, text: str) -> None:
    """Write a file under another name, fsync it, and rename it."""
    draft = path.with_suffix(_PART)
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)


def append_log_line(path: Path, text: str) -> None:
    """Append a line with the time to a log file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n")
