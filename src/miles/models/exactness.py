"""Which models can be computed so that a token's result depends on nothing but its past. No torch."""

from __future__ import annotations

from miles.models.foreign.spec import ForeignSpec
from miles.models.spec import DecoderSpec, DeltaSpec, MambaSpec, Mixer, MlaSpec


def inexact(spec: DecoderSpec) -> str | None:
    """Why there is no exact arithmetic for a model, if there is none; for a sentence to go on with."""
    if isinstance(spec, ForeignSpec):
        return f"{spec.architecture} is computed by transformers, whose operations depend on the batch they are in"
    problems = ((i, _inexact(layer.mixer)) for i, layer in enumerate(spec.layers))
    return next((f"layer {i} {problem}" for i, problem in problems if problem is not None), None)


def _inexact(mixer: Mixer | None) -> str | None:
    match mixer:
        case DeltaSpec() | MambaSpec():
            return "remembers by a state, which is summed up otherwise by steps than all at once"
        case MlaSpec() if mixer.indexer is not None:
            return "chooses whom it sees by an indexer, whose choice near a border depends on rounding"
        case _:
            return None
