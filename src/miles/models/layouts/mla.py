"""How latent attention and its scorer lie in a checkpoint."""

from __future__ import annotations

from miles.models.pieces import Parts, Place
from miles.models.spec import IndexerSpec, MlaSpec


def parts(spec: MlaSpec, width: int, at: Place) -> Parts:
    """Every projection is one tensor here as it is there; a layer that takes over a choice has no scorer."""
    queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.value_dim
    if spec.query_rank is None:
        out = at.linear("q", {"q": queries}, width, bias=False)
    else:
        out = at.linear("q_a", {"q_a": spec.query_rank}, width, bias=spec.bias)
        out |= at.tensor("q_a_norm.weight", "q_a_norm", (spec.query_rank,))
        out |= at.linear("q_b", {"q_b": queries}, spec.query_rank, bias=False)
    out |= at.linear("kv_a", {"kv_a": spec.kv_rank + spec.rope_dim}, width, bias=spec.bias)
    out |= at.tensor("kv_a_norm.weight", "kv_a_norm", (spec.kv_rank,))
    out |= at.linear("kv_b", {"kv_b": spec.num_heads * spec.nope_dim + values}, spec.kv_rank, bias=False)
    out |= at.linear("output", {"o": width}, values, bias=spec.bias)
    if spec.indexer is not None and spec.indexer.source is None:
        assert spec.query_rank is not None, "a scorer reads the latent of the queries"
        out |= _indexer(spec.indexer, spec.query_rank, width, at.within("indexer", "indexer"))
    return out


def _indexer(spec: IndexerSpec, rank: int, width: int, at: Place) -> Parts:
    out = at.linear("wq_b", {"index_q": spec.num_heads * spec.head_dim}, rank, bias=False)
    out |= at.linear("wk", {"index_k": spec.head_dim}, width, bias=False)
    out |= at.tensor("k_norm.weight", "index_k_norm", (spec.head_dim,))
    out |= at.tensor("k_norm.bias", "index_k_norm", (spec.head_dim,), leaf="bias")
    return out | at.linear("weights_proj", {"index_weights": spec.num_heads}, width, bias=False)
