"""How softmax attention lies in a checkpoint."""

from __future__ import annotations

from miles.models.pieces import Parts, Place
from miles.models.spec import AttentionSpec


def parts(spec: AttentionSpec, width: int, at: Place) -> Parts:
    """Queries (with their gates, head by head, where they have them), keys and values are one projection here."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rows = {"q": queries * (2 if spec.gated else 1), "k": keys, "v": keys}
    out = at.linear("qkv", rows, width, bias=spec.qkv_bias, fused="qkv")
    out |= at.linear("output", {"o": width}, queries, bias=spec.output_bias)
    if spec.qk_norm in ("head", "all"):
        each = spec.qk_norm == "head"
        out |= at.tensor("q_norm.weight", "q_norm", (spec.head_dim if each else queries,))
        out |= at.tensor("k_norm.weight", "k_norm", (spec.head_dim if each else keys,))
    if spec.sinks:
        out |= at.tensor("sinks", "sinks", (spec.num_heads,), leaf="")
    return out
