"""Mapping between decoder parameter names and Hugging Face tensor names. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from miles.models.checkpoint.hf_names import (
    HF_NAMES,
    map_altup,
    map_attention,
    map_compressed_attention,
    map_gated_deltanet,
    map_gated_residual,
    map_kimi_delta,
    map_laurel,
    map_mamba,
    map_mla,
    map_mlp,
    map_moe,
    map_ngram,
    map_relative_attention,
    map_short_conv,
)
from miles.models.checkpoint.param_slices import HfSlice, ModuleNames, ParamMap, concat_slices, param_shape
from miles.models.checkpoint.vision_names import map_vision
from miles.models.families.registry import find_family
from miles.models.residual_spec import GatedResidualSpec, HyperConnectionSpec
from miles.models.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    DecoderSpec,
    FeedForward,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    MlpSpec,
    RelativeAttentionSpec,
    ShortConvSpec,
)

__all__ = [
    "HfSlice",
    "build_layer_map",
    "build_param_map",
    "is_ignorable",
    "map_lm_head",
    "param_shape",
    "stacked_expert_names",
]


def _map_mixer(mixer: Mixer, width: int, layer: ModuleNames) -> ParamMap:
    match mixer:
        case AttentionSpec():
            return map_attention(mixer, width, layer.submodule("attention", "attention"))
        case RelativeAttentionSpec():
            return map_relative_attention(mixer, width, layer.submodule("relative", "relative"))
        case MlaSpec():
            return map_mla(mixer, width, layer.submodule("mla", "mla"))
        case CompressedAttentionSpec():
            return map_compressed_attention(mixer, width, layer.submodule("compressed", "compressed"))
        case GatedDeltaNetSpec():
            return map_gated_deltanet(mixer, width, layer.submodule("delta", "delta"))
        case KimiDeltaSpec():
            return map_kimi_delta(mixer, width, layer.submodule("kda", "kda"))
        case MambaSpec():
            return map_mamba(mixer, width, layer.submodule("mamba", "mamba"))
        case ShortConvSpec():
            return map_short_conv(mixer, width, layer.submodule("short_conv", "short_conv"))


def _map_ffn(ffn: FeedForward, width: int, layer: ModuleNames) -> ParamMap:
    if isinstance(ffn, MlpSpec):
        return map_mlp(ffn, width, layer.submodule("mlp", "mlp"))
    return map_moe(ffn, width, layer.submodule("moe", "moe"))


def build_layer_map(spec: LayerSpec, width: int, layer: ModuleNames) -> ParamMap:
    """Map the parameters of one layer, in the decoder's order."""
    params: ParamMap = {}
    if spec.mixer is not None:
        params |= layer.tensor("attention_norm.weight", "attention_norm", (width,)) if spec.has_norms else {}
        params |= _map_mixer(spec.mixer, width, layer)
        params |= _map_output_conv(spec, "attention_conv", width, layer)
        if spec.post_norms:
            params |= layer.tensor("attention_post_norm.weight", "attention_post_norm", (width,))
    if spec.ffn is not None:
        params |= layer.tensor("mlp_norm.weight", "mlp_norm", (width,)) if spec.has_norms else {}
        params |= _map_ffn(spec.ffn, width, layer)
        params |= _map_output_conv(spec, "mlp_conv", width, layer)
        if spec.post_norms:
            params |= layer.tensor("mlp_post_norm.weight", "mlp_post_norm", (width,))
    params |= _map_streams(spec, width, layer)
    if spec.per_layer_size:
        own = ModuleNames(f"{layer.prefix}.per_layer", layer.hf_prefix, layer.names)
        params |= own.linear("gate", {"per_layer_gate": spec.per_layer_size}, width, bias=False)
        params |= own.linear("projection", {"per_layer_projection": width}, spec.per_layer_size, bias=False)
        params |= own.tensor("norm.weight", "per_layer_norm", (width,))
    if spec.altup is not None:
        params |= map_laurel(spec.laurel_rank, width, layer.submodule("laurel", "laurel"))
        params |= map_altup(spec.altup.streams, width, layer.submodule("altup", "altup"))
    if spec.output_scale:
        params |= layer.tensor("output_scale", "output_scale", (1,), suffix="")
    return params


def _map_streams(spec: LayerSpec, width: int, layer: ModuleNames) -> ParamMap:
    """Map what is added to residual streams, and what reads and writes them."""
    hyper, params = spec.hyper, ParamMap()
    if spec.ngram is not None and hyper is not None:
        params |= map_ngram(spec.ngram, hyper.streams, width, layer.submodule("ngram", "ngram"))
    if isinstance(hyper, GatedResidualSpec):
        for part in ("attention_hyper", "mlp_hyper"):
            params |= map_gated_residual(hyper, width, layer.submodule(part, part))
    elif hyper is not None:
        params |= _map_hyper_connections(hyper, width, layer)
    return params


def _map_output_conv(spec: LayerSpec, name: str, width: int, layer: ModuleNames) -> ParamMap:
    """Map the short convolution behind a part of a layer, if there is one."""
    return layer.tensor(f"{name}.conv", name, (width, 1, spec.output_kernel)) if spec.output_kernel else {}


def _map_hyper_connections(spec: HyperConnectionSpec, width: int, layer: ModuleNames) -> ParamMap:
    shapes = {"fn": (spec.num_weights, spec.streams * width), "base": (spec.num_weights,), "scale": (3,)}
    return {
        f"{layer.prefix}.{part}_hyper.{name}": concat_slices(
            (f"{layer.hf_prefix}.{layer.names[f'{part}_hyper']}_{name}", shape)
        )
        for part in ("attention", "mlp")
        for name, shape in shapes.items()
    }


def map_hyper_head(spec: DecoderSpec, names: Mapping[str, str]) -> ParamMap:
    """Map the weights that join residual streams behind the last layer, if they are learned."""
    hyper = spec.hyper
    if isinstance(hyper, GatedResidualSpec):
        own = ModuleNames("hyper_head", names["hyper_head"], names)
        return map_gated_residual(hyper, spec.hidden_size, own, writes=False)
    if hyper is None or not hyper.learned_join:
        return {}
    shapes = {"fn": (hyper.streams, hyper.streams * spec.hidden_size), "base": (hyper.streams,), "scale": (1,)}
    return {
        f"hyper_head.{name}": concat_slices((f"{names['hyper_head']}_{name}", shape)) for name, shape in shapes.items()
    }


def map_per_layer_input(spec: DecoderSpec, names: Mapping[str, str]) -> ParamMap:
    """Map what computes the inputs of layers that have one of their own."""
    own = spec.per_layer_input
    if own is None:
        return {}
    rows = spec.num_layers * own.size
    return {
        "per_layer.table.weight": concat_slices((f"{names['per_layer_table']}.weight", (own.vocab_size, rows))),
        "per_layer.projection.weight": concat_slices((f"{names['per_layer_inputs']}.weight", (rows, spec.hidden_size))),
        "per_layer.norm.weight": concat_slices((f"{names['per_layer_inputs_norm']}.weight", (own.size,))),
    }


def map_altup_streams(spec: DecoderSpec, names: Mapping[str, str]) -> ParamMap:
    """Map the projections from the embedding to the other residual streams, and back behind the last layer."""
    square, params = (spec.hidden_size, spec.hidden_size), ParamMap()
    for name, key in (("projections", "altup_projection"), ("unembed_projections", "altup_unembed")):
        for i in range(0 if spec.altup is None else spec.altup.streams - 1):
            params[f"altup.{name}.{i}.weight"] = concat_slices((f"{names[key].format(i)}.weight", square))
    return params


@lru_cache(maxsize=8)
def build_param_map(spec: DecoderSpec) -> Mapping[str, tuple[HfSlice, ...]]:
    """Map every decoder parameter, in the decoder's order, to the Hugging Face tensors it consists of."""
    names = {**HF_NAMES, **find_family(spec.family).names}
    vocabulary, width = (spec.vocab_rows, spec.hidden_size), spec.hidden_size
    params: ParamMap = {"embedding.weight": concat_slices((f"{names['embedding']}.weight", vocabulary))}
    if spec.embedding_norm:
        params["embedding_norm.weight"] = concat_slices((f"{names['embedding_norm']}.weight", (width,)))
    params |= map_per_layer_input(spec, names)
    params |= map_altup_streams(spec, names)
    for i, layer in enumerate(spec.layers):
        params |= build_layer_map(layer, width, ModuleNames(f"layers.{i}", names["layer"].format(i), names))
    params |= map_hyper_head(spec, names)
    if spec.has_final_norm:
        params["norm.weight"] = concat_slices((f"{names['norm']}.weight", (width,)))
    if not spec.tie_embeddings:
        params["lm_head.weight"] = concat_slices((f"{names['lm_head']}.weight", vocabulary))
    if spec.vision is not None:
        params |= map_vision(spec.vision, width, names)
    return params


def map_lm_head(spec: DecoderSpec) -> HfSlice:
    """Return the tensor of the output layer, which a checkpoint of a model with tied embeddings may not have."""
    head = {**HF_NAMES, **find_family(spec.family).names}["lm_head"]
    return concat_slices((f"{head}.weight", (spec.vocab_rows, spec.hidden_size)))[0]


def stacked_expert_names(spec: DecoderSpec) -> Mapping[str, str]:
    """Map decoder name -> Hugging Face name for experts that a checkpoint may store as one stacked tensor.

    transformers keeps experts that way in memory, and some tools save them so where others save one tensor an expert.
    """
    names = {**HF_NAMES, **find_family(spec.family).names}
    if "stacked" in names or spec.moe is None:
        return {}
    first = "gate_up" if spec.moe.gated else "up"
    return {
        f"layers.{i}.moe.{param}": f"{names['layer'].format(i)}.{names['moe']}.{HF_NAMES[f'experts_{param}']}"
        for i in spec.moe_layers
        for param in (first, "down")
    }


def is_ignorable(spec: DecoderSpec, hf_name: str) -> bool:
    """Return whether a checkpoint may contain this tensor although no decoder parameter is read from it.

    Rotary buffers follow from the config; the lm_head of a tied model is a copy; a family declares what else its
    checkpoints contain that this decoder does not compute (multi-token-prediction layers, a vision tower).
    """
    family = find_family(spec.family)
    if hf_name.endswith(".rotary_emb.inv_freq"):
        return True
    head = {**HF_NAMES, **family.names}["lm_head"]
    if spec.tie_embeddings and hf_name == f"{head}.weight":
        return True
    return family.is_unused(spec, hf_name)
