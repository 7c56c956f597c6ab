"""How a Mamba-2 mixer lies in a checkpoint."""

from __future__ import annotations

from miles.models.pieces import Parts, Place
from miles.models.spec import MambaSpec


def parts(spec: MambaSpec, width: int, at: Place) -> Parts:
    """Gates, what is convolved and steps are one projection, there as here."""
    inner, heads = spec.num_heads * spec.head_dim, spec.num_heads
    channels = inner + 2 * spec.groups * spec.state_dim
    out = at.linear("input", {"mamba_in": inner + channels + heads}, width, bias=spec.bias)
    out |= at.tensor("conv", "conv", (channels, 1, spec.kernel))
    if spec.conv_bias:
        out |= at.tensor("conv_bias", "conv", (channels,), leaf="bias")
    out |= at.tensor("dt_bias", "dt_bias", (heads,), leaf="")
    out |= at.tensor("A_log", "a_log", (heads,), leaf="")
    out |= at.tensor("skip", "skip", (heads,), leaf="")
    out |= at.tensor("norm.weight", "gated_norm", (inner,))
    return out | at.linear("output", {"recurrent_out": width}, inner, bias=spec.bias)
