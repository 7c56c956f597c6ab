"""The table of the mathematics: what each name on the command line stands for.

Adding an algorithm is a function with a paragraph of docs, a row here, and a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from miles.algo.config import PAIRED, WITH_CRITIC, AlgoConfig
from miles.algo.corrections import BOUNDINGS, LEVELS, correction_of
from miles.algo.credit import (
    Checked,
    Compare,
    Compared,
    Supervised,
    Valued,
    as_earned,
    centred,
    group_relative,
    leave_one_out,
    max_likelihood,
    optimal_baseline,
    unrewarded,
)
from miles.algo.distill import TOKEN_SETS, WEIGHTS, Routed
from miles.algo.kl import k1, k2, k3, low_var_kl
from miles.algo.ladder import Mode
from miles.algo.length import Overlong
from miles.algo.mask import OffPolicySequences
from miles.algo.objective import (
    Clip,
    Correction,
    Divergence,
    Objective,
    PolicyLoss,
    Ratio,
    SupervisedLoss,
    Surrogate,
    clipped_surrogate,
    weighted_likelihood,
)
from miles.algo.preference import BradleyTerry, Paired, PreferenceLoss
from miles.algo.ratio import sequence_ratio, token_ratio
from miles.algo.reduce import Constant, Reducer, per_token, per_trajectory
from miles.algo.returns import Estimator, Gae, TokenReturns
from miles.core.errors import UsageError
from miles.core.protocols import Credit, Worth
from miles.core.types import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """What one value of --advantage-estimator sets: how attempts are compared, and how a token is judged."""

    compare: Compare
    ratio: Ratio = token_ratio
    surrogate: Surrogate = clipped_surrogate


ALGORITHMS: Mapping[str, Algorithm] = {
    "grpo": Algorithm(compare=group_relative),
    "gspo": Algorithm(compare=group_relative, ratio=sequence_ratio),
    "cispo": Algorithm(compare=group_relative, surrogate=weighted_likelihood),
    "rloo": Algorithm(compare=leave_one_out),
    "maxrl": Algorithm(compare=max_likelihood),
    "opo": Algorithm(compare=optimal_baseline),
    "reinforce_plus_plus": Algorithm(compare=as_earned),
    "reinforce_plus_plus_baseline": Algorithm(compare=centred),
    "ppo": Algorithm(compare=as_earned),
    "on_policy_distillation": Algorithm(compare=unrewarded),
}
ESTIMATORS: Mapping[str, Callable[..., Estimator]] = {
    "reinforce_plus_plus": TokenReturns,
    "reinforce_plus_plus_baseline": TokenReturns,
    "ppo": Gae,
}
DIVERGENCES: Mapping[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}

TABLES: Mapping[str, Mapping[str, Any]] = {
    "credit": {
        "grpo": group_relative,
        "centred": centred,
        "rloo": leave_one_out,
        "maxrl": max_likelihood,
        "opo": optimal_baseline,
        "as_earned": as_earned,
        "unrewarded": unrewarded,
        "roles": Compared,
        "sft": Supervised,
        "dpo": Paired,
    },
    "estimator": ESTIMATORS,
    "ratio": {"token": token_ratio, "sequence": sequence_ratio},
    "surrogate": {"clipped": clipped_surrogate, "cispo": weighted_likelihood},
    "divergence": DIVERGENCES,
    "objective": {
        "policy_loss": PolicyLoss,
        "sft_loss": SupervisedLoss,
        "dpo_loss": PreferenceLoss,
        "rm_loss": BradleyTerry,
    },
    "mask": {"opsm": OffPolicySequences},
    "correction level": LEVELS,
    "correction": {str(mode): bounding for mode, bounding in BOUNDINGS.items()},
    "length": {"overlong": Overlong},
    "token set": TOKEN_SETS,
    "teacher": {"routed": Routed},
    "teacher weight": {name: weigh.mean for name, weigh in WEIGHTS.items()},
    "reducer": {"per_trajectory": per_trajectory, "per_token": per_token, "constant": Constant},
}
"""Every function a name stands for, by kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugs:
    """A user's own mathematics, in place of ours."""

    objective: Objective | None = None
    reducer: Reducer | None = None
    correction: Correction | None = None


NO_PLUGS = Plugs()


def credit_of(
    config: AlgoConfig, *, response_limit: int, worth: Worth | None = None, credit: Credit | None = None
) -> Credit:
    """How a scored group becomes training rows; ``worth`` and ``credit`` are a user's own.

    ``response_limit`` is what an attempt's length is held against where it costs.
    """
    if config.loss_type == "sft_loss":
        return Supervised()
    if config.loss_type in PAIRED:
        return Paired()
    if credit is not None:
        return Checked(credit=credit)
    buffer, factor = config.overlong_buffer_len, config.overlong_penalty_factor
    penalty = None if buffer is None else Overlong(limit=response_limit, buffer=buffer, factor=factor)
    masked = frozenset({Status.FAILED}) if config.failed_attempts == "mask" else frozenset[Status]()
    compared = Compared(compare=compare_of(config), role_key=config.advantage_role_key, masked=masked)
    return Valued(worth=worth or compared, penalty=penalty, masked=masked)


def compare_of(config: AlgoConfig) -> Compare:
    """How attempts are held against each other."""
    compare = ALGORITHMS[config.advantage_estimator].compare
    return centred if compare is group_relative and not config.grpo_std_normalization else compare


def objective_of(config: AlgoConfig, plugs: Plugs = NO_PLUGS, mode: Mode | None = None) -> Objective:
    """What is minimised; ``mode`` is how the importance weights are bounded where the measured parity decides it."""
    if config.loss_type == "sft_loss":
        return SupervisedLoss()
    assert config.loss_type != "rm_loss", "a reward model has a trainer of its own"
    if config.loss_type == "dpo_loss":
        return PreferenceLoss(beta=config.dpo_beta, smoothing=config.dpo_label_smoothing)
    if config.loss_type == "custom_loss":
        assert plugs.objective is not None, "a custom loss was loaded where the run was wired"
        return plugs.objective
    if config.eps_clip_c is not None and config.eps_clip_c <= 1:
        raise UsageError(f"--eps-clip-c {config.eps_clip_c} must be above 1: it bounds a loss that starts at 1 x |A|.")
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    algorithm = ALGORITHMS[config.advantage_estimator]
    return PolicyLoss(
        clip=Clip(low=config.eps_clip, high=high, dual=config.eps_clip_c),
        divergence=divergence_of(config),
        ratio=algorithm.ratio,
        surrogate=algorithm.surrogate,
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        unbiased_kl=config.use_unbiased_kl,
        entropy_coef=config.entropy_coef,
        correction=plugs.correction or correction_of(config, mode),
        mask=OffPolicySequences(delta=config.opsm_delta) if config.use_opsm else None,
    )


def reducer_of(config: AlgoConfig, plugs: Plugs = NO_PLUGS) -> Reducer:
    """What a token weighs in the loss."""
    if plugs.reducer is not None:
        return plugs.reducer
    return mean_of(config) if config.constant_loss_length is None else Constant(length=config.constant_loss_length)


def mean_of(config: AlgoConfig) -> Reducer:
    """What a token weighs in a metric: the reducer's own weight where that is a mean."""
    return per_token if config.calculate_per_token_loss else per_trajectory


def estimator_of(config: AlgoConfig) -> Estimator:
    """How tokens are judged by an advantage estimator that the trainer computes."""
    if config.advantage_estimator in WITH_CRITIC:
        return ESTIMATORS[config.advantage_estimator](gamma=config.gamma, lambd=config.lambd)
    return ESTIMATORS[config.advantage_estimator](gamma=config.gamma)


def divergence_of(config: AlgoConfig) -> Divergence:
    """How the divergence from the reference is estimated."""
    return DIVERGENCES[config.kl_loss_type]


def rows() -> Iterator[tuple[str, str, str]]:
    """Every row as (kind, name, docs), in the order of the tables."""
    for kind, table in TABLES.items():
        for name, what in table.items():
            yield kind, name, (what.__doc__ or "").strip()
