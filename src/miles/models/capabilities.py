"""Optional features a decoder spec supports: batch-invariant numerics and prefix sharing in training. No torch."""

from __future__ import annotations

from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    ShortConvSpec,
)

# Channels of a head that the batch-invariant Triton kernels of softmax attention take at most.
MAX_HEAD_DIM = 256


def check_batch_invariance(spec: DecoderSpec) -> str | None:
    """Return why a model has no batch-invariant kernels (the end of a sentence), or None if it has."""
    if isinstance(spec, HfAdapterSpec):
        return f"{spec.architecture} is computed by transformers, whose operations are not batch-invariant"
    if spec.streams > 1:
        return "its layers are joined by hyper-connections, which have no batch-invariant kernels"
    indexers = ((i, layer.mixer.indexer) for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, MlaSpec))
    pooled = next((i for i, indexer in indexers if indexer is not None and indexer.pool > 1), None)
    if pooled is not None:
        return f"layer {pooled} selects pools of tokens, which has no batch-invariant kernel"
    problems = ((i, _check_mixer(layer.mixer)) for i, layer in enumerate(spec.layers))
    return next((f"layer {i} {problem}" for i, problem in problems if problem is not None), None)


def _check_mixer(mixer: Mixer | None) -> str | None:
    match mixer:
        case GatedDeltaNetSpec() | KimiDeltaSpec() | MambaSpec():
            return "is recurrent, and decoding step by step rounds its state differently than a whole sequence"
        case ShortConvSpec():
            return "is a short convolution, and batch-invariant attention backends keep no state of earlier tokens"
        case MlaSpec() if mixer.indexer is not None:
            return "selects tokens by a DSA indexer, whose selection depends on rounding"
        case AttentionSpec() if mixer.head_dim > MAX_HEAD_DIM:
            return f"has heads of {mixer.head_dim} channels, more than the {MAX_HEAD_DIM} of batch-invariant kernels"
        case _:
            return None


def check_prefix_sharing(spec: DecoderSpec) -> str | None:
    """Return why samples cannot share a common prefix in training (the end of a sentence), or None if they can."""
    if spec.recurrent:
        return "its recurrent layers carry a state through each whole sequence"
    if any(isinstance(layer.mixer, MlaSpec) and layer.mixer.indexer is not None for layer in spec.layers):
        return "its sparse attention selects among the tokens of a whole sequence"
    return None
