"""CUDA graphs of an engine: which models have them, tokens of a step with prefill, bytes of their pool. No torch."""

from __future__ import annotations

from miles.kernels.numerics import Numerics
from miles.models.accounting.activations import layer_bytes
from miles.models.accounting.kv_cache import PerTokenCache, cache_layout
from miles.models.accounting.params import BYTES, forward_flops_per_token
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    MlaSpec,
    ShortConvSpec,
)

# More tokens keep a GPU busy for longer than the host needs to launch kernels one by one; of models with fewer FLOPs
# per token than this, twice as many do.
_MAX_PREFILL_TOKENS = 2048
_SMALL_MODEL_FLOPS = 2e9

MAX_GRAPH_CONTEXT_TOKENS = 1 << 18
"""The most tokens of all rows together, each padded to the longest, that torch attends to in a graph: beyond that
attention takes longer than its launches, and padding costs more than they do."""
# Scores that torch materializes in float32, which several operations hold at once (kernels.attention.paged).
_SCORE_BYTES = 3 * 4 * (1 << 26)

_RECURRENT = (GatedDeltaNetSpec, KimiDeltaSpec, MambaSpec, ShortConvSpec)


def has_graph_kernels(spec: DecoderSpec) -> bool:
    """Return whether Triton kernels serve every layer: attention or MLA without an indexer, recurrent, or none."""
    return not isinstance(spec, HfAdapterSpec) and all(
        mixer is None
        or isinstance(mixer, _RECURRENT)
        or (isinstance(mixer, AttentionSpec | MlaSpec) and mixer.indexer is None)
        for mixer in (layer.mixer for layer in spec.layers)
    )


def has_decode_graphs(spec: DecoderSpec, numerics: Numerics) -> bool:
    """Return whether decode-only steps run as graphs; torch attention is captured with the fast numerics only."""
    return has_graph_kernels(spec) or not (isinstance(spec, HfAdapterSpec) or numerics.batch_invariant)


def has_prefill_graphs(spec: DecoderSpec) -> bool:
    """Return whether steps with prefill run as graphs: a recurrent layer scans as many tokens as a sequence has."""
    return has_graph_kernels(spec) and not any(isinstance(layer.mixer, _RECURRENT) for layer in spec.layers)


def count_prefill_graph_tokens(spec: DecoderSpec) -> int:
    """Return the most tokens of a step with prefill that runs as a CUDA graph."""
    return _MAX_PREFILL_TOKENS * (2 if forward_flops_per_token(spec) < _SMALL_MODEL_FLOPS else 1)


def graph_pool_bytes(spec: DecoderSpec, max_rows: int, dtype: str, numerics: Numerics) -> int:
    """Return about what the memory pool of all graphs takes: a layer of the largest step, and logits of all rows.

    The graphs share the pool, since none reads what another left there. What a layer saves for a backward pass bounds
    what an inference step holds at once. Where torch computes attention that is also the contexts of all rows, as they
    are in the cache and in float32, and their scores; exact arithmetic has no graphs there.
    """
    size = BYTES[dtype]
    tokens = count_prefill_graph_tokens(spec) if has_prefill_graphs(spec) else max_rows
    widest = max(layer_bytes(spec, index, size=size, fused=True) for index in range(len(spec.layers)))
    total = int(tokens * widest) + max_rows * spec.vocab_size * size
    if has_graph_kernels(spec):
        return total
    layouts = (cache_layout(layer.mixer, numerics) for layer in spec.layers)
    each = max((it.bytes_per_token(size, numerics) for it in layouts if isinstance(it, PerTokenCache)), default=0)
    return total + MAX_GRAPH_CONTEXT_TOKENS * each * (size + 4) // size + _SCORE_BYTES
