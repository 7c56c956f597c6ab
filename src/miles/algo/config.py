"""Knobs of the mathematics: how rewards become gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from miles.config.knob import knob

TOKEN_RETURNS = frozenset({"reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"})
"""Estimators whose advantages are reckoned token by token in the trainer, over all of a step's batch."""
WITH_CRITIC = frozenset({"ppo"})
"""Estimators that take a critic's values."""
DEFAULT_TEACHER = "default"
"""The name of the teacher of prompts that name none."""
UNREWARDED = "on_policy_distillation"
"""The estimator that learns from a teacher alone: rewards are measured, where there are any, and not learnt from."""
GIVEN: Mapping[str, str] = MappingProxyType(
    {"sft_loss": "demonstrations", "dpo_loss": "pairs of replies", "rm_loss": "pairs of replies"}
)
"""Losses over replies that the data gives, and what such a row is: nothing is sampled, scored or compared."""
PAIRED = frozenset({"dpo_loss", "rm_loss"})
"""Those of them whose rows are pairs of a chosen and a rejected reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """How rewards become gradients."""

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
    ] = knob("grpo", "The algorithm: how rewards become advantages, and how these become a gradient.")
    loss_type: Literal["policy_loss", "sft_loss", "dpo_loss", "rm_loss", "custom_loss"] = knob(
        "policy_loss",
        "What is minimised: a policy loss, the negative log-likelihood of demonstrations, the DPO loss of pairs of "
        "replies, the Bradley-Terry loss of a reward model over such pairs, or a plug of your own.",
    )
    dpo_beta: float = knob(
        0.1, "How strongly dpo_loss holds the policy to the reference: the scale of a reply's implicit reward."
    )
    dpo_label_smoothing: float = knob(
        0.0, "Probability with which dpo_loss takes a pair to be the wrong way round.", unit="share"
    )
    custom_loss_function_path: str | None = knob(
        None, "Plug that is minimised with --loss-type custom_loss (see algo.objective.Objective)."
    )
    eps_clip: float = knob(0.2, "How far below 1 the policy ratio may fall before a token's gradient stops.")
    eps_clip_high: float | None = knob(
        None, "How far above 1 the policy ratio may rise before a token's gradient stops; --eps-clip when not given."
    )
    eps_clip_c: float | None = knob(
        None, "Dual clip: the loss of a token with a negative advantage is at most this times |advantage|; above 1."
    )
    grpo_std_normalization: bool = knob(
        True,
        "Divide a group's centred rewards by their standard deviation.",
        off="--disable-grpo-std-normalization",
    )
    advantage_role_key: str | None = knob(
        None, "Compare attempts at a prompt only if they have the same value under this key of their metadata."
    )
    failed_attempts: Literal["mask", "train"] = knob(
        "mask",
        "What becomes of attempts whose environment or agent failed: left out of the loss and of what their group is "
        "measured by, or trained on with the reward 0.",
    )
    custom_reward_post_process_path: str | None = knob(
        None, "Plug that says what each attempt of a scored group is worth (see core.protocols.Worth)."
    )
    custom_convert_samples_to_train_data_path: str | None = knob(
        None, "Plug that makes the training rows of a scored group (see core.protocols.Credit)."
    )
    overlong_buffer_len: int | None = knob(
        None, "The last so many tokens before --rollout-max-response-len cost reward, rising to all at it.", unit="N"
    )
    overlong_penalty_factor: float = knob(
        1.0, "What an attempt of the full length loses of its reward with --overlong-buffer-len."
    )
    use_kl_loss: bool = knob(False, "Add the KL divergence from the reference model to the loss.")
    kl_loss_coef: float = knob(0.0, "Weight of the KL term in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = knob("k1", "Which estimator of the KL divergence is used.")
    use_unbiased_kl: bool = knob(
        False, "Multiply each token's KL by its policy ratio, which mends the estimate on what older weights wrote."
    )
    entropy_coef: float = knob(0.0, "Weight of the entropy bonus in the loss.")
    use_opsm: bool = knob(
        False, "Leave samples of negative advantage out of the loss that the policy has moved away from."
    )
    opsm_delta: float = knob(
        1e-4, "Mean log-prob that a sample must have lost since the engine wrote it, to be left out by --use-opsm."
    )
    kl_coef: float = knob(
        0.0,
        "Weight of the KL divergence from the reference model, estimated as --kl-loss-type, in each token's reward.",
    )
    gamma: float = knob(1.0, "Discount of a reward for every trained token that lies before it.")
    lambd: float = knob(
        1.0, "How far ppo looks beyond the critic's next value: 0 not at all, 1 to the end of the attempt."
    )
    normalize_advantages: bool = knob(
        False, "Shift and scale the advantages of all tokens of a step's batch to mean 0 and deviation 1."
    )
    value_clip: float = knob(0.2, "How far the critic's value of a token may move within one batch.")
    use_rollout_logprobs: bool | None = knob(
        None,
        "Take the old log-probs of the policy ratio from the engine and not from the trainer's own forward; "
        "when not given, only for a batch with tokens that older weights wrote.",
    )
    use_tis: bool = knob(
        False, "Weigh each token by the trainer's probability of it over the engine's: importance sampling."
    )
    tis_mode: Literal["truncate", "mask", "icepop", "auto"] = knob(
        "truncate",
        "What becomes of a weight beyond its bounds: held at them, made 0, made 0 within IcePop's bounds, "
        "or as the measured parity asks for.",
    )
    tis_level: Literal["token", "sequence", "geometric"] = knob(
        "token", "Whose ratio a weight is: the token's, the product over its sample's, or their geometric mean."
    )
    tis_clip: float | None = knob(
        None, "Upper bound of a token's importance weight; when not given 2, and 5 for icepop.", unit="ratio"
    )
    tis_clip_low: float | None = knob(
        None, "Lower bound of a token's importance weight; when not given 0, and 0.5 for icepop.", unit="ratio"
    )
    tis_batch_normalize: bool = knob(
        False, "Divide the importance weights by their mean over the global batch, so that it is 1."
    )
    custom_tis_function_path: str | None = knob(
        None, "Your own correction of the mismatch between engine and trainer, in place of the built-in ones."
    )
    use_rs: bool = knob(
        False, "Leave out of the loss what the trainer finds much more or much less likely than the engine did."
    )
    rs_level: Literal["token", "sequence", "geometric"] = knob(
        "token", "What --use-rs leaves out: tokens, or samples by the product or geometric mean of their ratios."
    )
    rs_upper_bound: float = knob(2.0, "Ratio of trainer to engine above which --use-rs leaves out.", unit="ratio")
    rs_lower_bound: float = knob(0.5, "Ratio of trainer to engine below which --use-rs leaves out.", unit="ratio")
    rs_veto_threshold: float | None = knob(
        None,
        "Leave a whole sample out when any of its tokens has a ratio of trainer to engine below this.",
        unit="ratio",
    )
    use_opd: bool = knob(False, "Also learn from a teacher that scores the very tokens the policy drew: distillation.")
    opd_kl_coef: float = knob(1.0, "Weight of the reverse KL from the teacher, beside what rewards are worth.")
    opd_log_prob_top_k: int = knob(
        0,
        "Tokens over which the reverse KL from the teacher is exact and in the loss, all others being one; -1 for the "
        "whole vocabulary, 0 to judge only the drawn token, in its advantage.",
        unit="N",
    )
    opd_top_k_strategy: Literal["only-student", "only-teacher", "intersection", "union", "xor"] = knob(
        "only-student", "Whose most likely tokens --opd-log-prob-top-k looks at one by one."
    )
    opd_reward_weight_mode: Literal["student_p", "teacher_p"] = knob(
        "student_p",
        "By whose probability the log-ratios of --opd-log-prob-top-k are weighed: the policy's, which is the reverse "
        "KL, or the teacher's, which is the forward KL.",
    )
    opd_type: Literal["sglang", "fsdp"] | None = knob(
        None,
        "Where teachers are: sglang for servers named by --opd-teacher-urls, fsdp for checkpoints that the trainer "
        "holds; follows from the flag that names them.",
    )
    opd_teacher_key: str = knob(
        "opd_teacher", "Key of a prompt's metadata that names its teacher, one of --opd-teachers or --opd-teacher-urls."
    )
    calculate_per_token_loss: bool = knob(
        False, "Weigh every trained token of a global batch alike, and not every trajectory."
    )
    constant_loss_length: int | None = knob(
        None, "Divide the loss of a trajectory by this number and not by how many tokens it has.", unit="tokens"
    )
    custom_pg_loss_reducer_function_path: str | None = knob(
        None, "Plug that says what a token of each trajectory weighs in the loss (see algo.reduce.Reducer)."
    )
    use_rollout_routing_replay: bool = knob(
        False, "Route the tokens of a mixture-of-experts model in training as the engine routed them."
    )
    use_routing_replay: bool = knob(
        False,
        "In all optimizer steps of a batch, route tokens to the experts that the trainer's own forward chose before "
        "the first; beside --use-rollout-routing-replay, those the engine did not record.",
    )


def distils(config: AlgoConfig) -> bool:
    """Does a teacher score what the policy wrote?"""
    asked = config.use_opd or config.advantage_estimator == UNREWARDED
    return asked and config.loss_type not in GIVEN
