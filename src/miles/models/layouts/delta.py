"""How a gated delta network lies in a checkpoint."""

from __future__ import annotations

from miles.models.pieces import Parts, Place
from miles.models.spec import DeltaSpec


def parts(spec: DeltaSpec, width: int, at: Place) -> Parts:
    """Queries, keys, values and gates are one projection here, and so are betas and steps.

    Their rows are those of the checkpoint: grouped by key head where it keeps them fused, else one kind below the
    other.
    """
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    qkv, heads = 2 * keys + values, spec.value_heads
    if spec.fused:
        out = at.linear("qkvz", {"delta_qkvz": qkv + values}, width, bias=False)
        out |= at.linear("ba", {"delta_ba": 2 * heads}, width, bias=False)
    else:
        out = at.linear("qkvz", {"delta_qkv": qkv, "delta_z": values}, width, bias=False)
        out |= at.linear("ba", {"delta_b": heads, "delta_a": heads}, width, bias=False)
    out |= at.tensor("conv", "conv", (qkv, 1, spec.kernel))
    out |= at.tensor("dt_bias", "dt_bias", (heads,), leaf="")
    out |= at.tensor("A_log", "a_log", (heads,), leaf="")
    out |= at.tensor("norm.weight", "gated_norm", (spec.value_dim,))
    return out | at.linear("output", {"recurrent_out": width}, values, bias=False)
