"""The table of the mathematics: what each name on the command line stands for.

Adding an algorithm is a function with a paragraph of docs, a row here, and a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from miles.algo.config import AlgoConfig
from miles.algo.credit import GroupRelative, Supervised
from miles.algo.kl import k1, k2, k3, low_var_kl
from miles.algo.objective import Clip, Divergence, Objective, PolicyLoss, Ratio, SupervisedLoss
from miles.algo.ratio import token_ratio
from miles.algo.reduce import Reducer, per_token, per_trajectory
from miles.core.errors import UsageError
from miles.core.protocols import Credit

CREDITS: Mapping[str, Callable[..., Credit]] = {"grpo": GroupRelative, "sft": Supervised}
RATIOS: Mapping[str, Ratio] = {"grpo": token_ratio}
DIVERGENCES: Mapping[str, Divergence] = {"k1": k1, "k2": k2, "k3": k3, "low_var_kl": low_var_kl}
OBJECTIVES: Mapping[str, Callable[..., Objective]] = {"policy_loss": PolicyLoss, "sft_loss": SupervisedLoss}
REDUCERS: Mapping[str, Reducer] = {"per_trajectory": per_trajectory, "per_token": per_token}

TABLES: Mapping[str, Mapping[str, Any]] = {
    "credit": CREDITS,
    "ratio": RATIOS,
    "divergence": DIVERGENCES,
    "objective": OBJECTIVES,
    "reducer": REDUCERS,
}


def credit_of(config: AlgoConfig) -> Credit:
    """How a scored group becomes training rows."""
    if config.loss_type == "sft_loss":
        return Supervised()
    return CREDITS[config.advantage_estimator](normalize_std=config.grpo_std_normalization)


def objective_of(config: AlgoConfig) -> Objective:
    """What is minimised."""
    if config.loss_type == "sft_loss":
        return SupervisedLoss()
    if config.eps_clip_c is not None and config.eps_clip_c <= 1:
        raise UsageError(f"--eps-clip-c {config.eps_clip_c} must be above 1: it bounds a loss that starts at 1 x |A|.")
    high = config.eps_clip if config.eps_clip_high is None else config.eps_clip_high
    return PolicyLoss(
        ratio=RATIOS[config.advantage_estimator],
        clip=Clip(low=config.eps_clip, high=high, dual=config.eps_clip_c),
        divergence=DIVERGENCES[config.kl_loss_type],
        kl_coef=config.kl_loss_coef if config.use_kl_loss else 0.0,
        entropy_coef=config.entropy_coef,
    )


def reducer_of(config: AlgoConfig) -> Reducer:
    """How a global batch is averaged."""
    return REDUCERS["per_token" if config.calculate_per_token_loss else "per_trajectory"]


def rows() -> Iterator[tuple[str, str, str]]:
    """Every row as (kind, name, docs), in the order of the tables."""
    for kind, table in TABLES.items():
        for name, what in table.items():
            yield kind, name, (what.__doc__ or "").strip()
