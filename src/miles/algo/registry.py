"""Algorithm registry: the functions and classes behind each name on the command line.

Adding an algorithm takes a function with a docstring, a row here, and a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles.algo.advantages import (
    GroupAdvantageFn,
    GroupRelativeAdvantages,
    OutcomeEstimator,
    OverlongPenalty,
    SFTEstimator,
    ValidatedEstimator,
    dr_grpo_advantages,
    grpo_advantages,
    maxrl_advantages,
    opo_advantages,
    raw_advantages,
    raw_reward_advantages,
    rloo_advantages,
    zero_advantages,
)
from miles.algo.config import CRITIC_ESTIMATORS, PREFERENCE_LOSSES, AlgoConfig
from miles.algo.correction_schedule import CorrectionMode
from miles.algo.distillation_loss import KL_DIRECTIONS, TOKEN_SETS, TeacherAssignedEstimator
from miles.algo.dpo import BradleyTerryLoss, DPOLoss, PairEstimator
from miles.algo.importance_sampling import LEVELS, WEIGHT_BOUNDINGS, build_correction
from miles.algo.loss_aggregation import ConstantLengthReducer, Reducer, mean_per_token, mean_per_trajectory
from miles.algo.policy_loss import (
    ClipRange,
    Correction,
    KLEstimator,
    LossFn,
    OffPolicySequenceMask,
    PolicyLoss,
    RatioFn,
    SFTLoss,
    SurrogateFn,
    cispo_loss,
    gspo_ratio,
    k1,
    k2,
    k3,
    low_var_kl,
    ppo_clip_loss,
    token_ratio,
)
from miles.algo.returns import GAE, ReinforcePlusPlusReturns, ReturnEstimator
from miles.core.errors import UsageError
from miles.core.protocols import AdvantageEstimator, AdvantageFn
from miles.core.types import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One value of --advantage-estimator: the group advantages, the ratio and the surrogate loss."""

    advantages: GroupAdvantageFn
    ratio: RatioFn = token_ratio
    surrogate: SurrogateFn = ppo_clip_loss


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(advantages=grpo_advantages),
    "gspo": Algorithm(advantages=grpo_advantages, ratio=gspo_ratio),
    "cispo": Algorithm(advantages=grpo_advantages, surrogate=cispo_loss),
    "rloo": Algorithm(advantages=rloo_advantages),
    "maxrl": Algorithm(advantages=maxrl_advantages),
    "opo": Algorithm(advantages=opo_advantages),
    "reinforce_plus_plus": Algorithm(advantages=raw_reward_advantages),
    "reinforce_plus_plus_baseline": Algorithm(advantages=dr_grpo_advantages),
    "ppo": Algorithm(advantages=raw_reward_advantages),
    "on_policy_distillation": Algorithm(advantages=zero_advantages),
}
RETURN_ESTIMATORS: Mapping[str, Callable[..., ReturnEstimator]] = {
    "reinforce_plus_plus": ReinforcePlusPlusReturns,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusReturns,
    "ppo": GAE,
}
KL_ESTIMATORS: Mapping[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}

REGISTRIES: Mapping[str, Mapping[str, Any]] = {
    "advantage": {
        "grpo": grpo_advantages,
        "dr_grpo": dr_grpo_advantages,
        "rloo": rloo_advantages,
        "maxrl": maxrl_advantages,
        "opo": opo_advantages,
        "raw_reward": raw_reward_advantages,
        "zero": zero_advantages,
        "group_relative": GroupRelativeAdvantages,
        "sft": SFTEstimator,
        "dpo": PairEstimator,
    },
    "return estimator": RETURN_ESTIMATORS,
    "ratio": {"token": token_ratio, "gspo": gspo_ratio},
    "surrogate": {"ppo_clip": ppo_clip_loss, "cispo": cispo_loss},
    "KL estimator": KL_ESTIMATORS,
    "loss": {
        "policy_loss": PolicyLoss,
        "sft_loss": SFTLoss,
        "dpo_loss": DPOLoss,
        "rm_loss": BradleyTerryLoss,
    },
    "mask": {"opsm": OffPolicySequenceMask},
    "correction level": LEVELS,
    "correction": {str(mode): bounding for mode, bounding in WEIGHT_BOUNDINGS.items()},
    "length penalty": {"overlong": OverlongPenalty},
    "token set": TOKEN_SETS,
    "teacher": {"assigned": TeacherAssignedEstimator},
    "teacher KL": {name: direction.kl for name, direction in KL_DIRECTIONS.items()},
    "reducer": {
        "mean_per_trajectory": mean_per_trajectory,
        "mean_per_token": mean_per_token,
        "constant_length": ConstantLengthReducer,
    },
}
"""All registered functions and classes by kind and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgoHooks:
    """User functions that replace the built-in ones."""

    loss_fn: LossFn | None = None
    reducer: Reducer | None = None
    correction: Correction | None = None


NO_ALGO_HOOKS = AlgoHooks()


def build_advantage_estimator(
    config: AlgoConfig,
    *,
    response_limit: int,
    advantage_fn: AdvantageFn | None = None,
    estimator: AdvantageEstimator | None = None,
) -> AdvantageEstimator:
    """Build the advantage estimator; ``advantage_fn`` and ``estimator`` are user hooks.

    ``response_limit`` is the maximum response length, for the overlong penalty.
    """
    if config.loss_type == "sft_loss":
        return SFTEstimator()
    if config.loss_type in PREFERENCE_LOSSES:
        return PairEstimator()
    if estimator is not None:
        return ValidatedEstimator(estimator=estimator)
    penalty = None
    if config.overlong_buffer_len is not None:
        penalty = OverlongPenalty(
            limit=response_limit, buffer=config.overlong_buffer_len, factor=config.overlong_penalty_factor
        )
    masked = frozenset({Status.FAILED}) if config.failed_trajectories == "mask" else frozenset[Status]()
    group_relative = GroupRelativeAdvantages(
        group_fn=select_group_advantages(config), role_key=config.advantage_role_key, masked=masked
    )
    return OutcomeEstimator(advantage_fn=advantage_fn or group_relative, penalty=penalty, masked=masked)


def select_group_advantages(config: AlgoConfig) -> GroupAdvantageFn:
    """Return the group advantage function of --advantage-estimator."""
    if not config.rewards_normalization:
        return raw_advantages
    advantages = ALGORITHMS[config.advantage_estimator].advantages
    return dr_grpo_advantages if advantages is grpo_advantages and not config.grpo_std_normalization else advantages


def build_loss(config: AlgoConfig, hooks: AlgoHooks = NO_ALGO_HOOKS, mode: CorrectionMode | None = None) -> LossFn:
    """Build the loss; ``mode`` is how importance weights are bounded if the measured parity decides it."""
    if config.loss_type == "sft_loss":
        return SFTLoss()
    assert config.loss_type != "rm_loss", "a reward model has its own trainer"
    if config.loss_type == "dpo_loss":
        return DPOLoss(beta=config.dpo_beta, smoothing=config.dpo_label_smoothing)
    if config.loss_type == "custom_loss":
        assert hooks.loss_fn is not None, "--loss-type custom_loss without a loaded loss function"
        return hooks.loss_fn
    if config.eps_clip_c is not None and config.eps_clip_c <= 1:
        raise UsageError(f"--eps-clip-c {config.eps_clip_c} must be above 1, because it bounds the loss at c x |A|.")
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    algorithm = ALGORITHMS[config.advantage_estimator]
    return PolicyLoss(
        clip=ClipRange(low=config.eps_clip, high=high, dual=config.eps_clip_c),
        kl_estimator=select_kl_estimator(config),
        ratio=algorithm.ratio,
        surrogate=algorithm.surrogate,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        unbiased_kl=config.use_unbiased_kl,
        entropy_coef=config.entropy_coef,
        correction=hooks.correction or build_correction(config, mode),
        mask=OffPolicySequenceMask(delta=config.opsm_delta) if config.use_opsm else None,
    )


def build_reducer(config: AlgoConfig, hooks: AlgoHooks = NO_ALGO_HOOKS) -> Reducer:
    """Return the reducer of the loss."""
    if hooks.reducer is not None:
        return hooks.reducer
    if config.constant_loss_length is not None:
        return ConstantLengthReducer(length=config.constant_loss_length)
    return select_metric_reducer(config)


def select_metric_reducer(config: AlgoConfig) -> Reducer:
    """Return the reducer of metrics, which is always a mean."""
    return mean_per_token if config.calculate_per_token_loss else mean_per_trajectory


def build_return_estimator(config: AlgoConfig) -> ReturnEstimator:
    """Build the token-level return estimator, for advantage estimators that run in the trainer."""
    if config.advantage_estimator in CRITIC_ESTIMATORS:
        return RETURN_ESTIMATORS[config.advantage_estimator](gamma=config.gamma, lambd=config.lambd)
    return RETURN_ESTIMATORS[config.advantage_estimator](gamma=config.gamma)


def select_kl_estimator(config: AlgoConfig) -> KLEstimator:
    """Return the estimator of the KL from the reference model."""
    return KL_ESTIMATORS[config.kl_loss_type]


def iter_registry() -> Iterator[tuple[str, str, str]]:
    """Yield every entry as (kind, name, docs)."""
    for kind, registry in REGISTRIES.items():
        for name, entry in registry.items():
            yield kind, name, (entry.__doc__ or "").strip()
