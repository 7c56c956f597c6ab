"""Rules of the algorithm: losses, advantages, returns, the critic, and importance-sampling corrections."""

import re
from collections.abc import Iterator
from pathlib import Path

from miles.algo.config import (
    CRITIC_ESTIMATORS,
    DISTILLATION_ESTIMATOR,
    OFFLINE_LOSSES,
    PREFERENCE_LOSSES,
    TOKEN_LEVEL_ESTIMATORS,
)
from miles.algo.correction_schedule import uses_correction
from miles.config.value_types import format_value
from miles.core.errors import MilesError
from miles.hooks.registry import ADVANTAGE, ALL_SAMPLES, BEFORE_LOG_PROBS, BUFFER_FILTER, ROLLOUT_LOG, SAMPLE_FILTER
from miles.launch.config import Config
from miles.launch.plan.hardware import count_accelerators
from miles.launch.plan.lora import starts_from_critic_adapter
from miles.launch.rules.flags import Rule, list_set_flags
from miles.launch.rules.paths import find_checkpoint_problem, read_spec_or_none
from miles.models.indexer_layout import build_indexer_layout
from miles.models.resolve import resolve_spec

_REDUCTION_FLAGS = ("--calculate-per-token-loss", "--constant-loss-length", "--custom-pg-loss-reducer-function-path")
_SAMPLING_FLAGS = (
    "--dynamic-sampling-filter-path",
    "--use-kl-loss",
    "--use-rollout-routing-replay",
    "--use-rollout-indexer-replay",
    "--use-routing-replay",
    "--use-tis",
    "--use-rs",
    "--rs-veto-threshold",
    "--max-weight-staleness",
    "--kl-coef",
    "--gamma",
    "--lambd",
    "--normalize-advantages",
    "--advantage-role-key",
    "--custom-reward-post-process-path",
    "--custom-convert-samples-to-train-data-path",
    "--overlong-buffer-len",
    "--use-opsm",
    "--use-opd",
    SAMPLE_FILTER.flag,
    ALL_SAMPLES.flag,
    BUFFER_FILTER.flag,
    ADVANTAGE.flag,
    BEFORE_LOG_PROBS.flag,
    ROLLOUT_LOG.flag,
)
_GENERATION_FLAGS = ("--rm-type", "--custom-rm-path", "--custom-generate-function-path")

# -- losses ---------------------------------------------------------------------------------


def check_offline_loss(c: Config) -> Iterator[str]:
    loss, estimator = c.algo.loss_type, c.algo.advantage_estimator
    if loss not in OFFLINE_LOSSES:
        return
    evaluates = bool(c.rollout.eval_prompt_data)  # evaluation generates and scores all the same
    unused = list_set_flags(c, *(() if evaluates else _GENERATION_FLAGS), *_SAMPLING_FLAGS)
    if c.rollout.n_samples_per_prompt != 1:
        unused += list_set_flags(c, "--n-samples-per-prompt")
    if estimator in CRITIC_ESTIMATORS or estimator == DISTILLATION_ESTIMATOR:
        unused.append(f"--advantage-estimator {estimator}")
    for flag in unused:
        yield f"--loss-type {loss} trains on {OFFLINE_LOSSES[loss]}, so {flag} has no effect; remove it."


def check_custom_loss(c: Config) -> Iterator[str]:
    if c.algo.loss_type != "custom_loss":
        return
    if c.algo.custom_loss_function_path is None:
        yield "--loss-type custom_loss needs --custom-loss-function-path: name the loss function."
    for flag in list_set_flags(
        c,
        "--eps-clip-high",
        "--eps-clip-c",
        "--kl-loss-coef",
        "--use-unbiased-kl",
        "--entropy-coef",
        "--use-opsm",
        "--use-tis",
        "--use-rs",
        "--rs-veto-threshold",
    ):
        yield f"--loss-type custom_loss replaces the policy loss that {flag} belongs to; remove one of them."


_NORMALIZING = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")


def check_rewards_normalization(c: Config) -> Iterator[str]:
    a = c.algo
    if not a.rewards_normalization and a.advantage_estimator not in _NORMALIZING:
        yield (
            f"--disable-rewards-normalization is for {', '.join(_NORMALIZING)}; --advantage-estimator "
            f"{a.advantage_estimator} has no such normalization to leave out, so remove it."
        )


def check_preference_loss(c: Config) -> Iterator[str]:
    a = c.algo
    r = c.rollout
    size = c.train.micro_batch_size
    if a.loss_type not in PREFERENCE_LOSSES:
        return
    if r.chosen_key == r.rejected_key:
        yield f"--chosen-key and --rejected-key are both {r.chosen_key}; name two different columns."
    for flag in list_set_flags(c, *_REDUCTION_FLAGS, "--entropy-coef"):
        yield f"--loss-type {a.loss_type} is the mean over pairs, so {flag} has no effect; remove it."
    if size is not None and size % 2 and not c.train.use_dynamic_batch_size:
        yield f"--micro-batch-size {size} would split a pair of replies; make it even."
    if a.loss_type == "rm_loss" and r.eval_prompt_data:
        yield "--loss-type rm_loss trains a model that cannot generate; remove --eval-prompt-data."


def check_loss_reduction(c: Config) -> Iterator[str]:
    flags = list_set_flags(c, *_REDUCTION_FLAGS)
    if len(flags) > 1:
        yield f"{' and '.join(flags)} each set how the loss is averaged; keep one."


def check_clipping(c: Config) -> Iterator[str]:
    if c.algo.eps_clip_c is not None and c.algo.advantage_estimator == "cispo":
        yield "--eps-clip-c bounds a loss that --advantage-estimator cispo does not have; remove it."


# -- advantages and returns -----------------------------------------------------------------


def check_group_size(c: Config) -> Iterator[str]:
    a, estimator = c.algo, c.algo.advantage_estimator
    single = estimator in ("reinforce_plus_plus", "ppo", DISTILLATION_ESTIMATOR) or a.loss_type in OFFLINE_LOSSES
    custom = a.custom_reward_post_process_path or a.custom_convert_samples_to_train_data_path
    if not single and not custom and c.rollout.n_samples_per_prompt < 2:
        yield f"--advantage-estimator {estimator} compares trajectories; set --n-samples-per-prompt to at least 2."


def check_custom_advantages(c: Config) -> Iterator[str]:
    a = c.algo
    convert, post_process = a.custom_convert_samples_to_train_data_path, a.custom_reward_post_process_path
    flag = "--custom-convert-samples-to-train-data-path" if convert else "--custom-reward-post-process-path"
    if convert and post_process:
        yield f"{flag} builds the samples itself and never calls --custom-reward-post-process-path; keep one."
    if convert and a.overlong_buffer_len is not None:
        yield f"{flag} builds the samples itself and ignores --overlong-buffer-len; remove one of them."
    if (convert or post_process) and a.advantage_role_key is not None:
        yield f"{flag} computes advantages itself and ignores --advantage-role-key; remove one of them."
    if c.hooks.custom_advantage_function_path is not None and a.advantage_estimator in TOKEN_LEVEL_ESTIMATORS:
        yield (
            f"{ADVANTAGE.flag} and --advantage-estimator {a.advantage_estimator} both compute per-token advantages; "
            "use grpo, whose advantages the function replaces."
        )


def check_role_key(c: Config) -> Iterator[str]:
    estimator = c.algo.advantage_estimator
    if c.algo.advantage_role_key is not None and estimator in ("reinforce_plus_plus", "ppo"):
        yield (
            f"--advantage-role-key is for estimators that compare trajectories, which {estimator} does not; remove it."
        )


def check_length_penalty(c: Config) -> Iterator[str]:
    a, limit = c.algo, c.rollout.rollout_max_response_len
    if a.overlong_buffer_len is None:
        return
    if a.overlong_buffer_len > limit:
        yield (
            f"--overlong-buffer-len {a.overlong_buffer_len} is longer than --rollout-max-response-len {limit}, whose "
            "last tokens it penalizes; lower it."
        )
    if a.advantage_estimator == "maxrl":
        yield (
            "--overlong-buffer-len makes rewards negative, and --advantage-estimator maxrl divides by their mean; "
            "remove one of them."
        )


def check_reward_kl(c: Config) -> Iterator[str]:
    a = c.algo
    if a.kl_coef > 0 and a.loss_type not in OFFLINE_LOSSES and a.advantage_estimator not in TOKEN_LEVEL_ESTIMATORS:
        yield (
            f"--kl-coef {format_value(a.kl_coef)} is subtracted from token rewards, which --advantage-estimator "
            f"{a.advantage_estimator} does not use; put the KL in the loss with --use-kl-loss and --kl-loss-coef."
        )


def check_normalized_advantages(c: Config) -> Iterator[str]:
    a, unscaled = c.algo, c.algo.advantage_estimator in TOKEN_LEVEL_ESTIMATORS - CRITIC_ESTIMATORS
    if a.loss_type not in OFFLINE_LOSSES and unscaled and not a.normalize_advantages:
        yield (
            f"--advantage-estimator {a.advantage_estimator} is defined with advantages normalized over the batch; add "
            "--normalize-advantages."
        )


def check_sampling_temperature(c: Config) -> Iterator[str]:
    if c.algo.loss_type not in OFFLINE_LOSSES and c.rollout.rollout_temperature == 0:
        yield "--rollout-temperature 0 is greedy, so all trajectories of a prompt would be equal; use 1."


# -- critic ---------------------------------------------------------------------------------


def check_critic_device(c: Config) -> Iterator[str]:
    name = c.train.critic_device
    if not re.fullmatch(r"auto|cpu|cuda(?::\d+)?", name):
        yield f"--critic-device {name} is not a device; use auto, cpu, cuda or cuda:1."
    elif name.startswith("cuda") and c.algo.advantage_estimator in CRITIC_ESTIMATORS:
        count, index = count_accelerators(), int(name.partition(":")[2] or 0)
        if count is not None and index >= count:
            yield f"--critic-device {name} does not exist: this machine has {count or 'no'} accelerators; name another."


def check_critic_checkpoint(c: Config) -> Iterator[str]:
    name, policy = c.train.critic_load, read_spec_or_none(c.models.hf_checkpoint, c.models.model_impl)
    if name is None or c.algo.advantage_estimator not in CRITIC_ESTIMATORS:
        return
    if starts_from_critic_adapter(c):
        if c.train.critic_device != "auto":
            yield (
                f"--critic-load {name} has adapters over the policy's base, which is not on --critic-device "
                f"{c.train.critic_device}; remove --critic-device."
            )
        return
    if problem := find_checkpoint_problem(Path(name)):
        yield f"--critic-load {name} {problem}"
        return
    try:
        spec = resolve_spec(name, c.models.model_impl)
    except MilesError as error:
        yield f"--critic-load {name} cannot be used: {error}"
        return
    if policy is not None and spec.vocab_size < policy.vocab_size:
        yield (
            f"--critic-load {name} has {spec.vocab_size} tokens and --hf-checkpoint {policy.vocab_size}; name a critic "
            "with the policy's whole vocabulary."
        )


def check_critic_schedule(c: Config) -> Iterator[str]:
    t, steps = c.train, c.schedule.num_rollout
    if t.critic_lr is not None and t.min_lr > t.critic_lr:
        yield f"--min-lr {format_value(t.min_lr)} is above --critic-lr {format_value(t.critic_lr)}; lower --min-lr."
    if t.lr_decay_iters is not None and t.critic_lr_warmup_iters > t.lr_decay_iters:
        warmup = f"--critic-lr-warmup-iters {t.critic_lr_warmup_iters}"
        yield f"{warmup} is longer than --lr-decay-iters {t.lr_decay_iters}; shorten it."
    if steps is not None and t.num_critic_only_steps >= steps:
        yield (
            f"--num-critic-only-steps {t.num_critic_only_steps} leaves none of the --num-rollout {steps} steps for the "
            "policy; lower it."
        )


# -- corrections of the logprob mismatch between engine and trainer ---------------------------


def check_correction_inputs(c: Config) -> Iterator[str]:
    if c.algo.use_rollout_logprobs:
        for flag in list_set_flags(c, "--use-tis", "--use-rs", "--rs-veto-threshold"):
            yield (
                f"{flag} compares the logprobs of trainer and engine, which --use-rollout-logprobs makes equal; remove "
                "one of them."
            )


def check_stale_tokens_are_weighted(c: Config) -> Iterator[str]:
    a, staleness = c.algo, c.schedule.max_weight_staleness
    if staleness == 0 or a.use_tis or a.use_rollout_logprobs is not None or not uses_correction(a):
        return
    flag = "--use-rs" if a.use_rs else "--rs-veto-threshold"
    yield (
        f"{flag} only masks tokens, but tokens of older weights (--max-weight-staleness {staleness}) need importance "
        "weights; add --use-tis, or --no-use-rollout-logprobs to train without them."
    )


def check_correction_mode(c: Config) -> Iterator[str]:
    a = c.algo
    if not a.use_tis:
        return
    if a.tis_mode in ("icepop", "auto") and a.tis_level != "token":
        yield f"--tis-mode {a.tis_mode} works on single tokens; remove --tis-level {a.tis_level}."
    for flag in list_set_flags(c, "--tis-clip", "--tis-clip-low") if a.tis_mode == "auto" else ():
        yield f"--tis-mode auto sets the bounds itself; remove {flag}, or name the mode."


def check_custom_correction(c: Config) -> Iterator[str]:
    if c.algo.custom_tis_function_path is None:
        return
    for flag in list_set_flags(
        c,
        "--tis-mode",
        "--tis-level",
        "--tis-clip",
        "--tis-clip-low",
        "--tis-batch-normalize",
        "--use-rs",
        "--rs-veto-threshold",
    ):
        yield f"{flag} is for the built-in corrections, which --custom-tis-function-path replaces; remove one of them."


def check_routing_replay(c: Config) -> Iterator[str]:
    if c.algo.use_rollout_routing_replay and not c.native.engine_return_routed_experts:
        yield "--use-rollout-routing-replay needs the routed experts; remove --disable-engine-return-routed-experts."
    flags = list_set_flags(c, "--use-rollout-routing-replay", "--use-routing-replay")
    spec = read_spec_or_none(c.models.hf_checkpoint) if flags else None
    for flag in flags:
        if c.models.model_impl == "transformers":
            yield f"{flag} needs the native model; remove it, or --model-impl transformers."
        elif spec is not None and spec.moe is None:
            yield f"{flag} is for mixture-of-experts models, which --hf-checkpoint is not; remove it."


def check_indexer_replay(c: Config) -> Iterator[str]:
    flag = "--use-rollout-indexer-replay"
    if not c.algo.use_rollout_indexer_replay:
        if c.native.engine_return_indexer_topk:
            yield f"--engine-return-indexer-topk has no effect without {flag}; add that, or remove it."
        return
    if c.models.model_impl == "transformers":
        yield f"{flag} needs the native model; remove it, or --model-impl transformers."
        return
    if c.sglang.rollout_external_engine_addrs:
        yield (
            f"{flag} needs engines of this run, which record what their indexers select, and "
            "--rollout-external-engine-addrs may name others; remove one of them."
        )
    elif c.sglang.rollout_backend == "sglang":
        yield (
            f"{flag} does not work with --rollout-backend sglang, whose indexers select in an order of their own; use "
            "served or native engines, or remove it."
        )
    spec = read_spec_or_none(c.models.hf_checkpoint)
    layout = None if spec is None else build_indexer_layout(spec)
    if spec is not None and layout is None:
        yield f"{flag} is for sparse-attention models with an indexer, which --hf-checkpoint is not; remove it."
    if layout is not None and layout.groups > 1 and c.cluster.rollout_num_gpus_per_engine > 1:
        yield (
            f"{flag} needs engines of one GPU where each key-value head selects blocks, because a rank of an engine "
            "records those of its own heads; set --rollout-num-gpus-per-engine to 1, or remove it."
        )


ALGORITHM_RULES: tuple[Rule, ...] = (
    check_offline_loss,
    check_custom_loss,
    check_rewards_normalization,
    check_preference_loss,
    check_loss_reduction,
    check_clipping,
    check_group_size,
    check_custom_advantages,
    check_role_key,
    check_length_penalty,
    check_reward_kl,
    check_normalized_advantages,
    check_sampling_temperature,
    check_critic_device,
    check_critic_checkpoint,
    check_critic_schedule,
    check_correction_inputs,
    check_stale_tokens_are_weighted,
    check_correction_mode,
    check_custom_correction,
    check_routing_replay,
    check_indexer_replay,
)
