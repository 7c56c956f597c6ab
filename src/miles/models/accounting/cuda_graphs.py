"""CUDA graphs of an engine: which models have them, tokens of a step with prefill, bytes of their pool. No torch."""

from __future__ import annotations

from miles.models.accounting.activations import layer_bytes
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


_RECURRENT = (GatedDeltaNetSpec, KimiDeltaSpec, MambaSpec, ShortConvSpec)


def has_graph_kernels(spec: DecoderSpec) -> bool:
    """Return whether Triton kernels serve every layer: attention or MLA without an indexer, recurrent, or none."""
    return not isinstance(spec, HfAdapterSpec) and all(
        mixer is None
        or isinstance(mixer, _RECURRENT)
        or (isinstance(mixer, AttentionSpec | MlaSpec) and mixer.indexer is None)
        for mixer in (layer.mixer for layer in spec.layers)
    )


def has_prefill_graphs(spec: DecoderSpec) -> bool:
    """Return whether steps with prefill run as graphs: a recurrent layer scans as many tokens as a sequence has."""
    return has_graph_kernels(spec) and not any(isinstance(layer.mixer, _RECURRENT) for layer in spec.layers)


def count_prefill_graph_tokens(spec: DecoderSpec) -> int:
    """Return the most tokens of a step with prefill that runs as a CUDA graph."""
    return _MAX_PREFILL_TOKENS * (2 if forward_flops_per_token(spec) < _SMALL_MODEL_FLOPS else 1)


def graph_pool_bytes(spec: DecoderSpec, max_rows: int, dtype: str) -> int:
    """Return about what the memory pool of all graphs takes: a layer of the largest step, and logits of all rows.

    The graphs share the pool, since none reads what another left there. What a layer saves for a backward pass bounds
    what an inference step holds at once.
    """
    size = BYTES[dtype]
    tokens = count_prefill_graph_tokens(spec) if has_prefill_graphs(spec) else max_rows
    widest = max(layer_bytes(spec, index, size=size, fused=True) for index in range(len(spec.layers)))
    return int(tokens * widest) + max_rows * spec.vocab_size * size
