"""Our parameter names and Hugging Face's: which tensors of a checkpoint make up each of ours. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from miles.models.families.table import family_of
from miles.models.layouts import attention, delta, mamba, mla, mlp, moe
from miles.models.layouts.names import NAMES
from miles.models.pieces import Parts, Piece, Place, joined, shape_of
from miles.models.spec import (
    AttentionSpec,
    DecoderSpec,
    DeltaSpec,
    FeedForward,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
)

__all__ = ["Piece", "ignorable", "layer_parts", "pieces", "shape_of", "stacked"]


def _mixer(mixer: Mixer, width: int, at: Place) -> Parts:
    match mixer:
        case AttentionSpec():
            return attention.parts(mixer, width, at.within("attention", "attention"))
        case MlaSpec():
            return mla.parts(mixer, width, at.within("mla", "mla"))
        case DeltaSpec():
            return delta.parts(mixer, width, at.within("delta", "delta"))
        case MambaSpec():
            return mamba.parts(mixer, width, at.within("mamba", "mamba"))


def _ffn(ffn: FeedForward, width: int, at: Place) -> Parts:
    if isinstance(ffn, MlpSpec):
        return mlp.parts(ffn, width, at.within("mlp", "mlp"))
    return moe.parts(ffn, width, at.within("moe", "moe"))


def layer_parts(layer: LayerSpec, width: int, at: Place) -> Parts:
    """The parameters of one layer, in the decoder's own order."""
    out: Parts = {}
    if layer.mixer is not None:
        out |= at.tensor("attention_norm.weight", "attention_norm", (width,))
        out |= _mixer(layer.mixer, width, at)
        if layer.post_norms:
            out |= at.tensor("attention_post_norm.weight", "attention_post_norm", (width,))
    if layer.ffn is not None:
        out |= at.tensor("mlp_norm.weight", "mlp_norm", (width,))
        out |= _ffn(layer.ffn, width, at)
        if layer.post_norms:
            out |= at.tensor("mlp_post_norm.weight", "mlp_post_norm", (width,))
    return out


@lru_cache(maxsize=8)
def pieces(spec: DecoderSpec) -> Mapping[str, tuple[Piece, ...]]:
    """Every parameter of ours, in the decoder's own order, and what it is made of on disk."""
    names = {**NAMES, **family_of(spec.family).names}
    vocabulary, width = (spec.vocab_size, spec.hidden_size), spec.hidden_size
    table: Parts = {"embedding.weight": joined((f"{names['embedding']}.weight", vocabulary))}
    for i, layer in enumerate(spec.layers):
        table |= layer_parts(layer, width, Place(f"layers.{i}", names["layer"].format(i), names))
    table["norm.weight"] = joined((f"{names['norm']}.weight", (width,)))
    if not spec.tie_embeddings:
        table["lm_head.weight"] = joined((f"{names['lm_head']}.weight", vocabulary))
    return table


def stacked(spec: DecoderSpec) -> Mapping[str, str]:
    """Ours -> the Hugging Face name, for experts a checkpoint may keep as one tensor shaped like ours.

    That is how transformers holds them in memory, and how some save what others keep an expert a tensor.
    """
    names = {**NAMES, **family_of(spec.family).names}
    if "stacked" in names or spec.moe is None:
        return {}
    first = "gate_up" if spec.moe.gated else "up"
    return {
        f"layers.{i}.moe.{ours}": f"{names['layer'].format(i)}.{names['moe']}.{NAMES[f'experts_{ours}']}"
        for i in spec.moe_layers
        for ours in (first, "down")
    }


def ignorable(spec: DecoderSpec, hf_name: str) -> bool:
    """May a checkpoint carry this tensor though no parameter of ours comes from it?

    Rotary buffers follow from the config; a head beside tied embeddings is a copy nobody reads; a family says what
    else it carries that this decoder does not compute (layers that predict several tokens ahead, a vision tower).
    """
    family = family_of(spec.family)
    if hf_name.endswith(".rotary_emb.inv_freq"):
        return True
    head = {**NAMES, **family.names}["lm_head"]
    if spec.tie_embeddings and hf_name == f"{head}.weight":
        return True
    return family.spare(spec, hf_name)
