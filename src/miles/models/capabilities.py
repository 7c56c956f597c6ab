"""Optional features a decoder spec supports: batch-invariant numerics and prefix sharing in training. No torch."""

from __future__ import annotations

from miles.kernels.numerics import MAX_HEAD_DIM
from miles.models.hf_adapter.spec import HfAdapterSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    Mixer,
    is_sparse,
)


def check_batch_invariance(spec: DecoderSpec) -> str | None:
    """Return why a model has no batch-invariant kernels (the end of a sentence), or None if it has."""
    if isinstance(spec, HfAdapterSpec):
        return f"{spec.architecture} is computed by transformers, whose operations are not batch-invariant"
    problems = ((i, _check_mixer(layer.mixer)) for i, layer in enumerate(spec.layers))
    return next((f"layer {i} {problem}" for i, problem in problems if problem is not None), None)


def _check_mixer(mixer: Mixer | None) -> str | None:
    match mixer:
        case AttentionSpec() if mixer.head_dim > MAX_HEAD_DIM:
            return f"has heads of {mixer.head_dim} channels, more than the {MAX_HEAD_DIM} of batch-invariant kernels"
        case _:
            return None


def check_prefix_sharing(spec: DecoderSpec) -> str | None:
    """Return why samples cannot share a common prefix in training (the end of a sentence), or None if they can."""
    if spec.recurrent:
        return "its recurrent layers carry a state through each whole sequence"
    if any(is_sparse(layer.mixer) for layer in spec.layers):
        return "its sparse attention selects among the tokens of a whole sequence"
    if any(isinstance(layer.mixer, CompressedAttentionSpec) for layer in spec.layers):
        return "its compressed attention divides each whole sequence into windows"
    return None
