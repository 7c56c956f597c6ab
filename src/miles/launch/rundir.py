"""A run is a directory: claimed by one process at a time, and continued only by the command that began it."""

from __future__ import annotations

import fcntl
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from miles.config.cli import parse
from miles.config.origin import to_toml, values_of
from miles.core.errors import ResumeError
from miles.launch.config import Config
from miles.schedule.recover import Checkpoints, Cursor

MAY_CHANGE = frozenset(
    {
        *("num_rollout", "num_epoch", "save", "load", "save_interval", "keep_checkpoints", "eval_interval"),
        *("async_save", "verify_checkpoints", "save_failure"),
        *("stall_timeout", "view", "use_tensorboard", "tb_dir", "custom_tracker_path", "save_rollouts", "num_threads"),
        *("save_debug_rollout_data", "session_audit"),
        *("parity_tolerance", "parity_stop", "parity_no_replay_interval", "max_dropped_groups"),
        *("reward_timeout", "max_unscored_attempts", "grade_workers", "rm_url", "rm_token_env", "rm_batch_size"),
        *("rm_concurrency", "rm_retries", "rm_request_timeout", "reward_model_url", "reward_model_token_env"),
        *("judge_url", "judge_token_env", "reward_num_workers", "reward_worker_concurrency"),
        *("actor_num_nodes", "actor_num_gpus_per_node", "tensor_model_parallel_size", "sequence_parallel"),
        *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("pipeline_model_parallel_size", "data_parallel_replicate_size", "distributed_timeout_minutes"),
        *("fsdp_cpu_offload", "optimizer_cpu_offload", "gradient_checkpointing", "recompute_granularity"),
        *("recompute_method", "recompute_num_layers", "offload_train"),
        *("rollout_num_engines", "rollout_external_engine_addrs", "rollout_engine_token_env", "sglang_python"),
        *("update_weight_transport", "update_weight_buffer_size", "update_weight_timeout", "rollout_start_timeout"),
        *("rollout_health_check_interval", "rollout_health_check_timeout", "rollout_health_check_first_wait"),
        *("max_restarts", "trainer_max_restarts", "heartbeat_timeout", "slow_rank_factor"),
        *("elastic", "elastic_min_engines", "elastic_min_ranks", "elastic_patience"),
        *("rollout_max_restarts", "runtime", "ray_address", "ray_placement_timeout"),
    }
)
"""Knobs a continued run may be given anew: they decide how long, how often and what is shown, not what is learnt."""


class RunDirectory:
    """``runs/<name>/``: config.toml, events.jsonl, metrics.jsonl, rollouts/, checkpoints/, logs/."""

    def __init__(
        self, path: Path, *, keep_checkpoints: int | None = None, background: bool = False, forgiving: bool = False
    ) -> None:
        self.path = path
        self.checkpoints = Checkpoints(
            path / "checkpoints", keep=keep_checkpoints, background=background, forgiving=forgiving
        )
        self.rescheduled = False
        self._lock: IO[str] | None = None

    def claim(self, config: Config, origins: Mapping[str, str]) -> tuple[Path, Cursor] | None:
        """Take the directory for this process; give the checkpoint to go on from, None for a fresh run.

        ``rescheduled`` then says whether a continued run was given another schedule than it had: it is
        still exact in what it learns, but its log need not repeat line by line what was undone.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        written = self.path / "config.toml"
        if written.exists():
            differ = self._differences(tomllib.loads(written.read_text()), config)
            if differ.keys() - MAY_CHANGE and self.checkpoints.latest() is not None:
                raise ResumeError(self._refusal(differ))
            self.rescheduled = bool(differ)
        elif any(p.name != "lock" for p in self.path.iterdir()):
            raise ResumeError(f"{self.path} is not empty and holds no run; name another directory with --save")
        _write_whole(written, to_toml(config, origins))
        return self.checkpoints.latest()

    def release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        lock = (self.path / "lock").open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            raise ResumeError(
                f"process {lock.read().strip() or 'unknown'} is running {self.path} now; wait for it, or give this run "
                "a directory of its own with --save"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    def _differences(self, stored: Mapping[str, Any], config: Config) -> dict[str, str]:
        """What of the stored config is another now, as a sentence a knob; a knob it does not know had its default."""
        default = parse(Config, ()).config
        assert default is not None, "no knob is without a default"
        before, now = _flat(default) | _joined(stored), _flat(config)
        return {
            name: f"{name} was {before.get(name, 'unset')!r} and is now {now.get(name, 'unset')!r}"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        }

    def _refusal(self, differ: Mapping[str, str]) -> str:
        changed = "; ".join(sentence for name, sentence in differ.items() if name not in MAY_CHANGE)
        newest = self.checkpoints.latest()
        weights = newest[0] if newest else self.path
        return (
            f"{self.path} holds a run that this command would not continue but change: {changed}; use the values it "
            f"was started with, or start a new run from its weights with --hf-checkpoint {weights} --save NEW"
        )


def _flat(config: Config) -> dict[str, Any]:
    """Every knob that is set, as a file would hold it."""
    return _joined(tomllib.loads(to_toml(config, dict.fromkeys(values_of(config), "now"))))


def _joined(sections: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for section in sections.values() for name, value in section.items()}


def _write_whole(path: Path, text: str) -> None:
    draft = path.with_suffix(".part")
    with draft.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.rename(draft, path)
