"""Which decoders can go on from a beginning that was read once for several sequences. No torch."""

from __future__ import annotations

from miles.models.spec import DecoderSpec, MlaSpec


def misfit(spec: DecoderSpec) -> str | None:
    """Why a model cannot; None where it can. For a sentence to go on with."""
    if spec.recurrent:
        return "its recurrent layers remember by a state, which must be carried through a whole sequence"
    if any(isinstance(layer.mixer, MlaSpec) and layer.mixer.indexer is not None for layer in spec.layers):
        return "its sparse attention chooses among the tokens of a whole sequence"
    return None
