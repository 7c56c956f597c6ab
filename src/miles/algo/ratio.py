"""How likely a token is now, over how likely it was when it was drawn.

``_R``: one entry a trained token of this micro-batch.
"""

from torch import Tensor

_FAR = 20.0


def token_ratio(logp_R: Tensor, old_logp_R: Tensor) -> Tensor:
    """Each token against itself, as in PPO and GRPO: exp(logp - old).

    The log-ratio is held within +-20 (a factor of 5e8): beyond it exp would overflow and the
    product of an infinite ratio and a clipped, zero gradient would be NaN.
    """
    return (logp_R - old_logp_R).clamp(-_FAR, _FAR).exp()
