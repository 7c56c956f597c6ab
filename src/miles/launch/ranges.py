"""In what range each number makes sense: a row for every numeric knob, checked one by one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from miles.config.help import shown
from miles.config.origin import DEFAULT, FLAG, Origins
from miles.config.table import Dataclass, knobs_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number: ``low`` and ``high`` belong to it, ``above`` and ``below`` do not, ``also`` does."""

    low: float | None = None
    above: float | None = None
    high: float | None = None
    below: float | None = None
    also: float | None = None

    def holds(self, value: float) -> bool:
        """Whether the value is inside."""
        if self.also is not None and value == self.also:
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.high is None or value <= self.high)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        parts = [
            f"{word} {shown(bound)}"
            for word, bound in (("at least", self.low), ("above", self.above))
            if bound is not None
        ] + [
            f"{word} {shown(bound)}"
            for word, bound in (("at most", self.high), ("below", self.below))
            if bound is not None
        ]
        return " and ".join(parts) + (f", or {shown(self.also)}" if self.also is not None else "")


ANY = Range(low=-(2**63), high=2**63 - 1)
COUNT = Range(low=1)
NOT_NEGATIVE = Range(low=0)
POSITIVE = Range(above=0)
FRACTION = Range(low=0, high=1)
PROBABILITY = Range(above=0, high=1)
DECAY = Range(low=0, below=1)
TOP_K = Range(low=1, also=-1)

RANGES: Mapping[str, Range] = MappingProxyType(
    {
        # rollout
        "rollout_seed": ANY,
        "rollout_batch_size": COUNT,
        "over_sampling_batch_size": COUNT,
        "async_max_concurrent_samples": COUNT,
        "n_samples_per_prompt": COUNT,
        "rollout_max_response_len": COUNT,
        "rollout_max_prompt_len": COUNT,
        "rollout_max_context_len": Range(low=2),
        "rollout_temperature": NOT_NEGATIVE,
        "rollout_top_p": PROBABILITY,
        "rollout_top_k": TOP_K,
        "rollout_stop_token_ids": NOT_NEGATIVE,
        "n_samples_per_eval_prompt": COUNT,
        "eval_temperature": NOT_NEGATIVE,
        "eval_top_p": PROBABILITY,
        "eval_top_k": TOP_K,
        "eval_max_response_len": COUNT,
        "reward_timeout": POSITIVE,
        "generate_max_turns": Range(low=1),
        "generate_max_turn_len": Range(low=1),
        "generate_timeout": POSITIVE,
        "tool_call_timeout": POSITIVE,
        "tool_timeout": POSITIVE,
        "tool_calls_per_turn": Range(low=1),
        "tool_result_chars": Range(low=1),
        "session_server_port": Range(low=0, high=65535),
        "agent_timeout": POSITIVE,
        "agent_max_turns": Range(low=1),
        "max_unscored_attempts": COUNT,
        "reward_num_workers": NOT_NEGATIVE,
        "reward_worker_concurrency": COUNT,
        "grade_workers": COUNT,
        "grade_timeout": POSITIVE,
        "rm_batch_size": COUNT,
        "rm_concurrency": COUNT,
        "rm_retries": NOT_NEGATIVE,
        "rm_request_timeout": POSITIVE,
        "judge_max_tokens": COUNT,
        "opd_teacher_batch_size": COUNT,
        "opd_teacher_concurrency": COUNT,
        "opd_teacher_retries": NOT_NEGATIVE,
        "opd_teacher_timeout": POSITIVE,
        "code_wall_seconds": POSITIVE,
        "code_cpu_seconds": POSITIVE,
        "code_memory_mib": Range(low=64),
        "code_processes": COUNT,
        "code_scratch_mib": COUNT,
        "code_output_kib": COUNT,
        "code_concurrency": COUNT,
        # algo
        "dpo_beta": POSITIVE,
        "dpo_label_smoothing": Range(low=0, below=0.5),
        "eps_clip": NOT_NEGATIVE,
        "eps_clip_high": NOT_NEGATIVE,
        "eps_clip_c": Range(above=1),
        "kl_loss_coef": NOT_NEGATIVE,
        "entropy_coef": NOT_NEGATIVE,
        "overlong_buffer_len": COUNT,
        "overlong_penalty_factor": POSITIVE,
        "opsm_delta": NOT_NEGATIVE,
        "constant_loss_length": COUNT,
        "opd_kl_coef": NOT_NEGATIVE,
        "opd_log_prob_top_k": Range(low=-1),
        "kl_coef": NOT_NEGATIVE,
        "gamma": FRACTION,
        "lambd": FRACTION,
        "value_clip": POSITIVE,
        "tis_clip": Range(low=1),
        "tis_clip_low": FRACTION,
        "rs_upper_bound": Range(low=1),
        "rs_lower_bound": FRACTION,
        "rs_veto_threshold": Range(above=0, below=1),
        # train
        "global_batch_size": COUNT,
        "num_steps_per_rollout": COUNT,
        "seed": ANY,
        "lr": NOT_NEGATIVE,
        "min_lr": NOT_NEGATIVE,
        "lr_decay_iters": COUNT,
        "lr_warmup_iters": NOT_NEGATIVE,
        "lr_warmup_fraction": FRACTION,
        "critic_lr": NOT_NEGATIVE,
        "critic_lr_warmup_iters": NOT_NEGATIVE,
        "num_critic_only_steps": NOT_NEGATIVE,
        "adam_beta1": DECAY,
        "adam_beta2": DECAY,
        "adam_eps": POSITIVE,
        "weight_decay": NOT_NEGATIVE,
        "muon_momentum": DECAY,
        "muon_num_ns_steps": Range(low=1, high=99),
        "muon_extra_scale_factor": POSITIVE,
        "clip_grad": NOT_NEGATIVE,
        "lora_rank": NOT_NEGATIVE,
        "lora_alpha": POSITIVE,
        "lora_dropout": DECAY,
        "max_tokens_per_gpu": COUNT,
        "micro_batch_size": COUNT,
        "recompute_num_layers": COUNT,
        "log_probs_chunk_size": COUNT,
        # parallel
        "tensor_model_parallel_size": COUNT,
        "context_parallel_size": COUNT,
        "expert_model_parallel_size": COUNT,
        "expert_tensor_parallel_size": COUNT,
        "pipeline_model_parallel_size": COUNT,
        "data_parallel_replicate_size": COUNT,
        "distributed_timeout_minutes": COUNT,
        # cast
        "cast_timeout": POSITIVE,
        # schedule
        "num_rollout": COUNT,
        "num_epoch": COUNT,
        "max_weight_staleness": NOT_NEGATIVE,
        "shelf_window": COUNT,
        "save_interval": COUNT,
        "keep_checkpoints": COUNT,
        "eval_interval": COUNT,
        "parity_tolerance": POSITIVE,
        "parity_stop": POSITIVE,
        "parity_no_replay_interval": NOT_NEGATIVE,
        "stall_timeout": POSITIVE,
        "max_dropped_groups": COUNT,
        # native
        "engine_max_running": COUNT,
        "engine_page_size": COUNT,
        "engine_kv_tokens": COUNT,
        "engine_memory_fraction": PROBABILITY,
        "engine_prefill_chunk": COUNT,
        "engine_prefill_patience": NOT_NEGATIVE,
        # sglang
        "rollout_num_engines": COUNT,
        "update_weight_buffer_size": COUNT,
        "update_weight_timeout": POSITIVE,
        "rollout_start_timeout": POSITIVE,
        "rollout_health_check_interval": POSITIVE,
        "rollout_health_check_timeout": POSITIVE,
        "rollout_health_check_first_wait": NOT_NEGATIVE,
        "rollout_max_restarts": NOT_NEGATIVE,
        # faults
        "max_restarts": NOT_NEGATIVE,
        "trainer_max_restarts": NOT_NEGATIVE,
        "heartbeat_timeout": NOT_NEGATIVE,
        "slow_rank_factor": NOT_NEGATIVE,
        # cluster
        "num_threads": COUNT,
        "actor_num_nodes": COUNT,
        "actor_num_gpus_per_node": COUNT,
        "rollout_num_gpus": COUNT,
        "rollout_num_gpus_per_engine": COUNT,
        "ray_placement_timeout": POSITIVE,
        # serve
        "drain_seconds": NOT_NEGATIVE,
        "max_body_mib": COUNT,
        "tensor_parallel_size": COUNT,
        # route
        "port": Range(low=0, high=65535),
        "prefix_tokens": COUNT,
        "spill_factor": Range(low=1),
        "spill_floor": COUNT,
        "max_retries": NOT_NEGATIVE,
        "max_concurrent_requests": COUNT,
        "queue_size": NOT_NEGATIVE,
        "queue_timeout_secs": NOT_NEGATIVE,
        "max_payload_size": COUNT,
        "connect_timeout_secs": POSITIVE,
        "first_byte_timeout_secs": POSITIVE,
        "request_timeout_secs": POSITIVE,
        "broadcast_timeout_secs": POSITIVE,
        "drain_timeout_secs": NOT_NEGATIVE,
        "health_check_interval_secs": POSITIVE,
        "health_check_timeout_secs": POSITIVE,
        "health_failure_threshold": COUNT,
        "health_success_threshold": COUNT,
        "quarantine_secs": POSITIVE,
        "max_quarantine_secs": POSITIVE,
        # demo
        "steps": COUNT,
        # elastic
        "elastic_min_engines": COUNT,
        "elastic_min_ranks": COUNT,
        "elastic_patience": COUNT,
        # engines
        "add_servers": COUNT,
        "timeout": POSITIVE,
        # show and replay
        "step": COUNT,
        "sample": NOT_NEGATIVE,
        "length": Range(low=2),
        "tokens": NOT_NEGATIVE,
        "prefill_chunk": COUNT,
        "tolerance": NOT_NEGATIVE,
    }
)


def out_of_range(config: Dataclass, origins: Origins) -> Iterator[tuple[str, str]]:
    """(knob, sentence) of every number outside its range."""
    for knob in knobs_of(type(config)).values():
        if knob.kind.scalar not in (int, float) or knob.name not in RANGES:
            continue
        value: Any = getattr(getattr(config, knob.room), knob.name)
        for number in value if knob.kind.many else () if value is None else (value,):
            if not RANGES[knob.name].holds(number):
                origin = origins[knob.name]
                where = "" if origin in (FLAG, DEFAULT) else f" (from {origin})"
                yield knob.name, f"{knob.flag} must be {RANGES[knob.name]}, not {shown(number)}{where}."
