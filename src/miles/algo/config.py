"""Knobs of the mathematics: how rewards become gradients."""

from dataclasses import dataclass
from typing import Literal

from miles.config.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoConfig:
    """How rewards become gradients."""

    advantage_estimator: Literal["grpo"] = knob(
        "grpo", "How rewards become advantages: grpo compares an attempt with the other attempts at its prompt."
    )
    loss_type: Literal["policy_loss", "sft_loss"] = knob(
        "policy_loss", "What is minimised: the clipped policy loss, or the negative log-likelihood of demonstrations."
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
    use_kl_loss: bool = knob(False, "Add the KL divergence from the reference model to the loss.")
    kl_loss_coef: float = knob(0.0, "Weight of the KL term in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = knob("k1", "Which estimator of the KL divergence is used.")
    entropy_coef: float = knob(0.0, "Weight of the entropy bonus in the loss.")
    use_rollout_logprobs: bool | None = knob(
        None,
        "Take the old log-probs of the policy ratio from the engine and not from the trainer's own forward; "
        "when not given, only for a batch with tokens that older weights wrote.",
    )
    calculate_per_token_loss: bool = knob(
        False, "Weigh every trained token of a global batch alike, and not every trajectory."
    )
    use_rollout_routing_replay: bool = knob(
        False, "Route the tokens of a mixture-of-experts model in training as the engine routed them."
    )
