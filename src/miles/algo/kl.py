"""Estimators of the divergence of the policy from a reference, one number a token drawn from the policy.

``_R``: one entry a trained token of this micro-batch.
"""

from torch import Tensor

_FAR = 20.0
_MOST = 10.0


def k1(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    """The log-ratio itself, logp - ref: unbiased and of high variance; a single token's may be negative."""
    return logp_R - ref_logp_R


def k2(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, never negative; its gradient is that of the true divergence."""
    return 0.5 * (logp_R - ref_logp_R).square()


def k3(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    """exp(ref - logp) - (ref - logp) - 1: unbiased, never negative and of low variance."""
    log_ratio_R = ref_logp_R - logp_R
    return log_ratio_R.exp() - log_ratio_R - 1


def low_var_kl(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    """k3 held within +-10, so that one token the two models disagree on wildly cannot rule a step."""
    # A log-ratio beyond 20 gives far more than 10 either way; holding it first keeps 0 * inf out of the gradient.
    log_ratio_R = (ref_logp_R - logp_R).clamp(-_FAR, _FAR)
    return (log_ratio_R.exp() - log_ratio_R - 1).clamp(-_MOST, _MOST)
