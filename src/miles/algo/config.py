"""Options of the RL algorithm: advantages, loss, corrections, distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.config.option import option

TOKEN_LEVEL_ESTIMATORS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"})
"""Advantage estimators that the trainer computes per token over a whole batch."""
CRITIC_ESTIMATORS = frozenset({"ppo"})
"""Advantage estimators that need a critic."""
DEFAULT_TEACHER = "default"
"""Name of the teacher of prompts that name none."""
DISTILLATION_ESTIMATOR = "on_policy_distillation"
"""The estimator that trains on a teacher's signal only; rewards are logged but not trained on."""
OFFLINE_LOSSES: Mapping[str, str] = MappingProxyType(
    {"sft_loss": "demonstrations", "dpo_loss": "pairs of responses", "rm_loss": "pairs of responses"}
)
"""Losses on responses of the dataset (nothing is sampled), and what a row of the dataset is."""
PREFERENCE_LOSSES = frozenset({"dpo_loss", "rm_loss"})
"""Losses on pairs of a chosen and a rejected response."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """Advantage estimator, losses, clipping, KL, importance sampling and distillation."""

    advantage_estimator: Literal[
        "grpo",
        "gspo",
        "cispo",
        "rloo",
        "maxrl",
        "opo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "ppo",
        "on_policy_distillation",
    ] = option("grpo", "RL algorithm: how rewards become advantages and how these enter the loss.")
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss"] = option(
        "policy_loss",
        "Loss to minimise: policy loss, negative log-likelihood of demonstrations (SFT), DPO loss of "
        "preference pairs, Bradley-Terry loss of a reward model, or a custom hook.",
    )
    dpo_beta: float = option(
        0.1,
        "DPO beta: scale of the implicit reward, which controls how far the policy may move from the reference.",
        gt=0,
    )
    dpo_label_smoothing: float = option(
        0.0, "Probability that the label of a preference pair is wrong (conservative DPO).", unit="share", ge=0, lt=0.5
    )
    custom_loss_function_path: str | None = option(
        None, "Hook: loss function for --loss-type custom_loss (see algo.policy_loss.LossFn)."
    )
    eps_clip: float = option(0.2, "PPO clip range below 1: a token whose ratio falls further gets no gradient.", ge=0)
    eps_clip_high: float | None = option(
        None,
        "PPO clip range above 1; --eps-clip when not given.",
        ge=0,
    )
    eps_clip_c: float | None = option(
        None,
        "Dual clip: the loss of a token with a negative advantage is at most this times |advantage|; above 1.",
        gt=1,
    )
    grpo_std_normalization: bool = option(
        True,
        "Divide a group's centred rewards by their standard deviation; off is Dr.GRPO.",
        off="--disable-grpo-std-normalization",
    )
    rewards_normalization: bool = option(
        True,
        "Subtract the group's mean from rewards and divide by its deviation, as the estimator says; off trains on the "
        "rewards as they are.",
        off="--disable-rewards-normalization",
    )
    advantage_role_key: str | None = option(
        None, "Compare only trajectories of a prompt that have the same value under this metadata key."
    )
    failed_trajectories: Literal["mask", "train"] = option(
        "mask",
        "What happens to trajectories whose environment, agent or reward failed: mask leaves them out of the loss and"
        " of the group baseline, and drops groups without any other; train keeps them with reward 0.",
    )
    custom_reward_post_process_path: str | None = option(
        None, "Hook: advantages of the trajectories of a scored group (see core.protocols.AdvantageFn)."
    )
    custom_convert_samples_to_train_data_path: str | None = option(
        None, "Hook: training samples of a scored group (see core.protocols.AdvantageEstimator)."
    )
    overlong_buffer_len: int | None = option(
        None,
        "Number of tokens before --rollout-max-response-len over which the overlong penalty grows to its maximum.",
        unit="N",
        ge=1,
    )
    overlong_penalty_factor: float = option(
        1.0, "Maximum overlong penalty, subtracted from the reward of a response of maximum length.", gt=0
    )
    use_kl_loss: bool = option(False, "Add the KL divergence from the reference model to the loss.")
    kl_loss_coef: float = option(0.0, "Weight of the KL term in the loss.", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = option(
        "k1", "Estimator of the KL divergence from the reference model."
    )
    use_unbiased_kl: bool = option(
        False,
        "Multiply each token's KL by its policy ratio, which makes the estimate unbiased for tokens of older versions.",
    )
    entropy_coef: float = option(0.0, "Weight of the entropy bonus in the loss.", ge=0)
    use_opsm: bool = option(
        False, "Off-policy sequence masking: drop samples with negative advantage that the policy has moved away from."
    )
    opsm_delta: float = option(
        1e-4,
        "Mean log-prob decrease since sampling above which --use-opsm drops a sample.",
        ge=0,
    )
    kl_coef: float = option(
        0.0,
        "Coefficient of the KL from the reference model (estimated by --kl-loss-type) in each token's reward.",
        ge=0,
    )
    gamma: float = option(1.0, "Discount factor per trained token.", ge=0, le=1)
    lambd: float = option(1.0, "GAE lambda of ppo: 0 uses only the critic's next value, 1 the full return.", ge=0, le=1)
    normalize_advantages: bool = option(
        False, "Whiten the advantages over all tokens of a step's batch to mean 0 and standard deviation 1."
    )
    value_clip: float = option(0.2, "Clip range of the critic's value change within one batch.", gt=0)
    use_rollout_logprobs: bool | None = option(
        None,
        "Take the old log-probs of the policy ratio from the engine instead of a trainer forward pass; when "
        "not given, only for batches with tokens of older versions.",
    )
    use_tis: bool = option(
        False, "Importance sampling: weight each token by the ratio of the trainer's to the engine's probability."
    )
    tis_mode: Literal["truncate", "mask", "icepop", "auto"] = option(
        "truncate",
        "What happens to weights outside the bounds: truncate clamps them (TIS), mask sets them to 0 (MIS), "
        "icepop masks with IcePop's bounds, auto chooses by the measured parity.",
    )
    tis_level: Literal["token", "sequence", "geometric"] = option(
        "token",
        "Level of the importance ratio: token, product over the sample (sequence), or geometric mean over the sample.",
    )
    tis_clip: float | None = option(
        None, "Upper bound of a token's importance weight; when not given 2, and 5 for icepop.", unit="ratio", ge=1
    )
    tis_clip_low: float | None = option(
        None,
        "Lower bound of a token's importance weight; when not given 0, and 0.5 for icepop.",
        unit="ratio",
        ge=0,
        le=1,
    )
    tis_batch_normalize: bool = option(False, "Divide the importance weights by their mean over the global batch.")
    custom_tis_function_path: str | None = option(
        None, "Hook: correction of the mismatch between engine and trainer, instead of the built-in ones."
    )
    use_rs: bool = option(
        False,
        "Rejection sampling: drop tokens or samples whose ratio of trainer to engine probability is outside "
        "the bounds.",
    )
    rs_level: Literal["token", "sequence", "geometric"] = option(
        "token", "Level of --use-rs: tokens, or samples by the product or geometric mean of their ratios."
    )
    rs_upper_bound: float = option(
        2.0, "Ratio of trainer to engine probability above which --use-rs drops.", unit="ratio", ge=1
    )
    rs_lower_bound: float = option(
        0.5, "Ratio of trainer to engine probability below which --use-rs drops.", unit="ratio", ge=0, le=1
    )
    rs_veto_threshold: float | None = option(
        None,
        "Drop a whole sample if any of its tokens has a ratio of trainer to engine probability below this.",
        unit="ratio",
        gt=0,
        lt=1,
    )
    use_opd: bool = option(False, "On-policy distillation: also train on a teacher's log-probs of the sampled tokens.")
    opd_kl_coef: float = option(
        1.0, "Coefficient of the KL from the teacher, added to the reward-based objective.", ge=0
    )
    opd_log_prob_top_k: int = option(
        0,
        "Number of tokens over which the KL from the teacher is exact and part of the loss, with all others "
        "in one bucket; -1 for the whole vocabulary, 0 for the sampled token only, in its advantage.",
        unit="N",
        ge=-1,
    )
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = option(
        "only-student", "Whose most likely tokens form the token set of --opd-log-prob-top-k."
    )
    opd_reward_weight_mode: Literal["student_p", "teacher_p"] = option(
        "student_p",
        "KL direction of --opd-log-prob-top-k: student_p is the reverse KL, teacher_p the forward KL.",
    )
    opd_type: Literal["sglang", "fsdp"] | None = option(
        None,
        "Where teachers run: sglang for servers of --opd-teacher-urls, fsdp for checkpoints loaded by the "
        "trainer; inferred from those flags when not given.",
    )
    opd_teacher_key: str = option(
        "opd_teacher", "Prompt metadata key that names its teacher, one of --opd-teachers or --opd-teacher-urls."
    )
    calculate_per_token_loss: bool = option(
        False, "Average the loss over all trained tokens of a global batch instead of over trajectories."
    )
    constant_loss_length: int | None = option(
        None,
        "Divide the loss of a trajectory by this constant instead of its number of tokens (Dr.GRPO).",
        unit="tokens",
        ge=1,
    )
    custom_pg_loss_reducer_function_path: str | None = option(
        None, "Hook: weight of a token of each trajectory in the loss (see algo.loss_aggregation.Reducer)."
    )
    use_rollout_routing_replay: bool = option(
        False, "Rollout routing replay (R3): route MoE tokens in training to the experts that the engine used."
    )
    use_rollout_indexer_replay: bool = option(
        False,
        "Rollout indexer replay: in training, tokens of a sparse-attention model (DSA, block or pool indexers) attend "
        "to the keys that the engine's indexers selected for them.",
    )
    use_routing_replay: bool = option(
        False,
        "Routing replay: in all optimizer steps of a batch, route tokens to the experts of the trainer's "
        "first forward pass; with --use-rollout-routing-replay, only tokens that the engine did not record.",
    )


def uses_distillation(config: AlgoConfig) -> bool:
    """Return whether a teacher scores the sampled tokens."""
    requested = config.use_opd or config.advantage_estimator == DISTILLATION_ESTIMATOR
    return requested and config.loss_type not in OFFLINE_LOSSES
