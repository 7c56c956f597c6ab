"""How likely a token is now, over how likely it was when it was drawn.

``_R``: one entry a trained token of this micro-batch.
"""

from torch import Tensor

from miles.algo.reduce import Layout

_FAR = 20.0


def token_ratio(log_ratio_R: Tensor, layout: Layout) -> Tensor:
    """Each token against itself, as in PPO and GRPO: exp(logp - old).

    The log-ratio is held within +-20 (a factor of 5e8): beyond it exp would overflow and the
    product of an infinite ratio and a clipped, zero gradient would be NaN.
    """
    return log_ratio_R.clamp(-_FAR, _FAR).exp()


def sequence_ratio(log_ratio_R: Tensor, layout: Layout) -> Tensor:
    """All tokens of a sample share one ratio, the geometric mean of theirs, as in GSPO: exp(mean(logp - old)).

    The value is the sample's, the gradient each token's own: a token's ratio is sg[s] * exp(logp - sg[logp]).
    Where all tokens of a sample have one advantage and one weight, this is the gradient of the plain form, and
    it needs nothing of the other tokens but a number. The exponent is held within +-20.
    """
    own_R = log_ratio_R - log_ratio_R.detach()
    return (layout.mean_of_sample(log_ratio_R.detach()) + own_R).clamp(-_FAR, _FAR).exp()
