"""Upstream's reward functions of on-policy distillation: a run with a teacher asks it by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from miles.core.errors import HookError
from miles.hooks.compat.types import UpstreamSample

_ESTIMATOR = "on_policy_distillation"


async def reward_func(args: Any, sample: UpstreamSample, **kwargs: Any) -> float:
    """0: what is trained on is the teacher's log-prob of each token, which the run requests itself."""
    if not (args.use_opd or args.advantage_estimator == _ESTIMATOR):
        raise HookError(
            "miles.rollout.on_policy_distillation.reward_func needs a teacher; add --use-opd and --opd-teacher-urls "
            "URL, or --opd-teacher-load."
        )
    return 0.0


def post_process_rewards(
    args: Any, samples: Sequence[UpstreamSample], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """No reward beside the teacher's."""
    return [0.0] * len(samples), [0.0] * len(samples)
