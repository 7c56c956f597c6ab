"""Rules of the form "flag A needs flag B", in one table, and the helper that lists the flags a user has set."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from miles.algo.config import (
    CRITIC_ESTIMATORS,
    DISTILLATION_ESTIMATOR,
    OFFLINE_LOSSES,
    PREFERENCE_LOSSES,
    TOKEN_LEVEL_ESTIMATORS,
    uses_distillation,
)
from miles.algo.correction_schedule import uses_correction
from miles.backends.native.config import NativeConfig
from miles.config.schema import flag_from_name, get_options
from miles.hooks.registry import DATA_BUFFER, EVAL_LOG, EVALUATE, GENERATE
from miles.launch.config import Config
from miles.launch.plan.drafts import choose_speculation
from miles.launch.plan.topology import is_distributed, is_remote, uses_ray

Rule = Callable[[Config], Iterator[str]]


def list_set_flags(c: Config, *flags: str) -> list[str]:
    """Those of ``flags`` whose option is not at its default."""
    options = get_options(Config)
    names = {flag: flag.removeprefix("--").replace("-", "_") for flag in flags}
    return [
        flag
        for flag, name in names.items()
        if getattr(getattr(c, options[name].section), name) != options[name].default
    ]


@dataclass(frozen=True, slots=True)
class FlagsNeed:
    """A rule: each of ``flags`` needs what ``needed`` names, which is there when ``is_met``."""

    flags: tuple[str, ...]
    needed: str
    is_met: Callable[[Config], bool]

    def __call__(self, c: Config) -> Iterator[str]:
        if not self.is_met(c):
            for flag in list_set_flags(c, *self.flags):
                yield f"{flag} needs {self.needed}; add that, or remove {flag}."


def _is_offline(c: Config) -> bool:
    return c.algo.loss_type in OFFLINE_LOSSES


def _uses_multi_turn(c: Config) -> bool:
    return GENERATE.resolve_name(c.rollout.custom_generate_function_path) == "multi_turn"


_LOSS_RULES = (
    FlagsNeed(("--kl-loss-coef", "--use-unbiased-kl"), "--use-kl-loss", lambda c: c.algo.use_kl_loss),
    FlagsNeed(("--opsm-delta",), "--use-opsm", lambda c: c.algo.use_opsm),
    FlagsNeed(
        ("--overlong-penalty-factor",), "--overlong-buffer-len", lambda c: c.algo.overlong_buffer_len is not None
    ),
    FlagsNeed(("--custom-loss-function-path",), "--loss-type custom_loss", lambda c: c.algo.loss_type == "custom_loss"),
    FlagsNeed(
        ("--chosen-key", "--rejected-key"),
        "--loss-type dpo_loss or rm_loss",
        lambda c: c.algo.loss_type in PREFERENCE_LOSSES,
    ),
    FlagsNeed(
        ("--dpo-beta", "--dpo-label-smoothing"), "--loss-type dpo_loss", lambda c: c.algo.loss_type == "dpo_loss"
    ),
    FlagsNeed(("--loss-mask-type",), "--loss-type sft_loss", lambda c: c.algo.loss_type == "sft_loss"),
    FlagsNeed(
        ("--loss-mask-type",),
        "--apply-chat-template, since plain text has no turns",
        lambda c: c.rollout.apply_chat_template or c.algo.loss_type != "sft_loss",
    ),
    FlagsNeed(
        ("--gamma",),
        "--advantage-estimator reinforce_plus_plus, reinforce_plus_plus_baseline or ppo",
        lambda c: _is_offline(c) or c.algo.advantage_estimator in TOKEN_LEVEL_ESTIMATORS,
    ),
    FlagsNeed(
        ("--lambd",),
        "--advantage-estimator ppo",
        lambda c: _is_offline(c) or c.algo.advantage_estimator in CRITIC_ESTIMATORS,
    ),
    FlagsNeed(
        ("--critic-load", "--critic-device", "--critic-lr", "--critic-lr-warmup-iters", "--num-critic-only-steps"),
        "--advantage-estimator ppo",
        lambda c: c.algo.advantage_estimator in CRITIC_ESTIMATORS,
    ),
)
_CORRECTION_RULES = (
    FlagsNeed(
        ("--tis-mode", "--tis-level", "--tis-clip", "--tis-clip-low", "--custom-tis-function-path"),
        "--use-tis",
        lambda c: c.algo.use_tis,
    ),
    FlagsNeed(("--rs-level", "--rs-upper-bound", "--rs-lower-bound"), "--use-rs", lambda c: c.algo.use_rs),
    FlagsNeed(("--tis-batch-normalize",), "--use-tis or --use-rs", lambda c: uses_correction(c.algo)),
)
_DISTILLATION_RULES = (
    FlagsNeed(
        (
            "--opd-teacher-load",
            "--opd-teachers",
            "--opd-teacher-urls",
            "--opd-type",
            "--opd-reward-weight-mode",
            "--opd-kl-coef",
            "--opd-log-prob-top-k",
            "--opd-top-k-strategy",
            "--opd-teacher-key",
        ),
        "--use-opd",
        lambda c: c.algo.use_opd or c.algo.advantage_estimator == DISTILLATION_ESTIMATOR,
    ),
    FlagsNeed(
        (
            "--opd-teacher-token-env",
            "--opd-teacher-batch-size",
            "--opd-teacher-concurrency",
            "--opd-teacher-retries",
            "--opd-teacher-timeout",
        ),
        "--opd-teacher-urls",
        lambda c: bool(c.rollout.opd_teacher_urls),
    ),
    FlagsNeed(
        ("--opd-top-k-strategy",),
        "--opd-log-prob-top-k",
        lambda c: not uses_distillation(c.algo) or c.algo.opd_log_prob_top_k > 0,
    ),
    FlagsNeed(
        ("--opd-reward-weight-mode",),
        "--opd-log-prob-top-k",
        lambda c: not uses_distillation(c.algo) or c.algo.opd_log_prob_top_k != 0,
    ),
    FlagsNeed(
        ("--opd-teacher-key",),
        "--opd-teachers",
        lambda c: not uses_distillation(c.algo) or bool(c.train.opd_teachers or c.rollout.opd_teacher_urls),
    ),
)


def _starts_native_engines(c: Config) -> bool:
    return c.sglang.rollout_backend != "sglang" and not c.sglang.rollout_external_engine_addrs


def _starts_engines(c: Config) -> bool:
    return not c.sglang.rollout_external_engine_addrs


_HTTP_ENGINES = "engines behind HTTP: --rollout-backend served or sglang, or --rollout-external-engine-addrs"
NOTED_FLAGS = (
    FlagsNeed(
        (
            "--update-weight-transport",
            "--update-weight-buffer-size",
            "--rollout-health-check-interval",
            "--rollout-health-check-timeout",
            "--rollout-health-check-first-wait",
        ),
        _HTTP_ENGINES,
        is_remote,
    ),
    FlagsNeed(
        ("--sequence-parallel",),
        "--tensor-model-parallel-size 2 or more",
        lambda c: c.parallel.tensor_model_parallel_size > 1,
    ),
    FlagsNeed(
        (
            "--speculative-num-draft-tokens",
            "--speculative-num-branches",
            "--speculative-history-tokens",
            "--speculative-adaptive",
        ),
        "--speculative-algorithm",
        lambda c: choose_speculation(c).algorithm != "none",
    ),
)
"""Flags that upstream's launch lines often have where nothing follows from them: they are noted, not refused."""

_ENGINE_RULES = (
    FlagsNeed(
        tuple(flag_from_name(field.name) for field in fields(NativeConfig)),
        "the native engine, in this process or with --rollout-backend served (options of SGLang are --sglang-*)",
        _starts_native_engines,
    ),
    FlagsNeed(
        ("--update-weight-timeout", "--rollout-start-timeout", "--rollout-max-restarts"), _HTTP_ENGINES, is_remote
    ),
    FlagsNeed(
        ("--rollout-num-gpus", "--rollout-num-gpus-per-engine", "--colocate"),
        "engines that this run starts, not --rollout-external-engine-addrs",
        _starts_engines,
    ),
    FlagsNeed(
        ("--sglang-python",),
        "SGLang servers that this run starts with --rollout-backend sglang",
        lambda c: c.sglang.rollout_backend == "sglang" and _starts_engines(c),
    ),
)
_ROLLOUT_RULES = (
    FlagsNeed(
        ("--eval-interval", EVALUATE.flag, EVAL_LOG.flag),
        "--eval-prompt-data, a name and a file for each held-out set",
        lambda c: bool(c.rollout.eval_prompt_data),
    ),
    FlagsNeed(
        ("--generate-tools", "--generate-tool-specs-path", "--generate-environment"),
        "--custom-generate-function-path multi_turn",
        _uses_multi_turn,
    ),
    FlagsNeed(
        ("--reward-num-workers",),
        "a reward, named by --rm-type or --custom-rm-path",
        lambda c: c.rollout.rm_type is not None or c.rollout.custom_rm_path is not None,
    ),
    FlagsNeed(
        ("--partial-rollout",),
        "--over-sampling-batch-size",
        lambda c: c.async_rollout.over_sampling_batch_size is not None,
    ),
    FlagsNeed(
        ("--pause-generation-mode",), "--max-weight-staleness 1 or more", lambda c: c.schedule.max_weight_staleness > 0
    ),
    FlagsNeed((DATA_BUFFER.flag,), "--reorder-window 2 or more", lambda c: c.schedule.reorder_window > 1),
    FlagsNeed(
        ("--debug-train-only",),
        "--load-debug-rollout-data",
        lambda c: c.observe.load_debug_rollout_data is not None or _is_offline(c),
    ),
)
_CLUSTER_RULES = (
    FlagsNeed(
        (
            "--lora-alpha",
            "--target-modules",
            "--exclude-modules",
            "--experts-shared-outer-loras",
            "--use-rslora",
            "--use-dora",
            "--lora-dropout",
            "--lora-versions",
        ),
        "--lora-rank",
        lambda c: c.lora.is_enabled,
    ),
    FlagsNeed(
        ("--recompute-method",),
        "--recompute-granularity",
        lambda c: c.train.recompute_granularity is not None or c.train.gradient_checkpointing,
    ),
    FlagsNeed(("--recompute-num-layers",), "--recompute-method block", lambda c: c.train.recompute_method == "block"),
    FlagsNeed(
        ("--fsdp-cpu-offload", "--share-prefix", "--data-parallel-replicate-size"),
        "--train-backend fsdp",
        lambda c: c.train.train_backend == "fsdp",
    ),
    FlagsNeed(
        ("--pipeline-model-parallel-size",),
        "--train-backend megatron",
        lambda c: c.train.train_backend == "megatron",
    ),
    FlagsNeed(("--rollout-num-engines", "--rollout-engine-token-env"), "--rollout-backend served or sglang", is_remote),
    FlagsNeed(("--ray-address", "--ray-placement-timeout"), "--runtime ray", uses_ray),
    FlagsNeed(
        ("--distributed-timeout-minutes", "--trainer-max-restarts"),
        "a trainer of several ranks, given by --actor-num-gpus-per-node",
        is_distributed,
    ),
    FlagsNeed(
        (
            "--muon-momentum",
            "--muon-use-nesterov",
            "--muon-num-ns-steps",
            "--muon-scale-mode",
            "--muon-extra-scale-factor",
        ),
        "--optimizer muon",
        lambda c: c.train.optimizer == "muon",
    ),
    FlagsNeed(
        ("--profile-target", "--profile-step-start", "--profile-step-end"),
        "--use-pytorch-profiler",
        lambda c: c.observe.use_pytorch_profiler,
    ),
    FlagsNeed(
        ("--memory-snapshot-dir", "--memory-snapshot-num-steps"),
        "--record-memory-history",
        lambda c: c.observe.record_memory_history,
    ),
    FlagsNeed(
        ("--elastic-min-engines", "--elastic-min-ranks", "--elastic-patience"),
        "--elastic",
        lambda c: c.elastic.elastic,
    ),
)
_DRAFT_RULES = (
    FlagsNeed(
        ("--draft-lr", "--draft-loss", "--draft-train-steps", "--mtp-loss-scaling-factor"),
        "--draft-train mtp or eagle3",
        lambda c: c.train.draft_train != "none",
    ),
    FlagsNeed(("--draft-load",), "--draft-train eagle3", lambda c: c.train.draft_train == "eagle3"),
)
FLAG_RULES: tuple[Rule, ...] = (
    *_LOSS_RULES,
    *_CORRECTION_RULES,
    *_DISTILLATION_RULES,
    *_ENGINE_RULES,
    *_ROLLOUT_RULES,
    *_CLUSTER_RULES,
    *_DRAFT_RULES,
)
