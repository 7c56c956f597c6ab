"""Llama 4, the text model: most layers rotate and see a chunk, some do neither, and experts weigh what goes in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.core.errors import UsageError
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_HEAD_DIM = 128
_THETA = 500_000.0
_CHUNK = 8192
_FLOOR = 8192
_SLOPE = 0.1
_PLAIN_EVERY = 4
_DENSE = 16_384

_NAMES = {
    "mlp": "feed_forward",
    "moe": "feed_forward",
    "router": "router",
    "shared": "shared_expert",
    "stacked": "transposed",
}
_INSIDE = {
    "embedding": "language_model.model.embed_tokens",
    "layer": "language_model.model.layers.{}",
    "norm": "language_model.model.norm",
    "lm_head": "language_model.lm_head",
}


def read(config: Mapping[str, Any], family: str = "llama4_text") -> DecoderSpec:
    fields = Fields(config, family)
    common = fields.common(eps=_EPS)
    fields.only("hidden_act", "silu")
    size = fields.whole("intermediate_size")
    moe = MoeSpec(
        **fields.experts("num_local_experts"),
        size=size,
        norm_topk_prob=False,
        score="sigmoid",
        weigh_input=True,
        shared=MlpSpec(size=size),
    )
    mlp = MlpSpec(size=fields.whole("intermediate_size_mlp", _DENSE))
    mixers = _attention(fields)
    step = fields.whole("interleave_moe_layer_step", 1)
    named = config.get("moe_layers")
    sparse = frozenset(range(step - 1, len(mixers), step) if named is None else named)
    fields.settle()
    layers = (LayerSpec(mixer=mixer, ffn=moe if i in sparse else mlp) for i, mixer in enumerate(mixers))
    return DecoderSpec(**common, layers=tuple(layers))


def _attention(fields: Fields) -> tuple[AttentionSpec, ...]:
    """Each layer's: with positions and normalised after, or without and sharper the later a token is."""
    count, bias = fields.whole("num_hidden_layers"), fields.flag("attention_bias")
    own = {**fields.heads(head_dim=_HEAD_DIM), "qkv_bias": bias, "output_bias": bias}
    rope: RopeSpec = fields.rope(theta=_THETA, interleaved=True)
    every = fields.whole("no_rope_layer_interval", _PLAIN_EVERY)
    # An empty list is no list.
    turned = fields.config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(count)]
    if len(turned) < count:
        fields.refuse("no_rope_layers", f"names {len(turned)} layers, but there are {count}")
        turned = count * [True]
    named = ("full_attention", "chunked_attention")
    chunks = [kind == named[1] for kind in fields.kinds(lambda i: named[bool(turned[i])], *named)]
    chunk = fields.whole("attention_chunk_size", None if "attention_chunk_size" in fields.config else _CHUNK)
    normed = {"rope": rope, "qk_norm": "unit" if fields.flag("use_qk_norm", True) else "none"}
    # Some published configs count how many times instead of saying true.
    tuned = bool(fields.config.get("attn_temperature_tuning", True))
    slope = fields.number("floor_scale", _FLOOR), fields.number("attn_scale", _SLOPE)
    plain = {"rope": None, "temperature": slope if tuned else None}
    return tuple(
        AttentionSpec(**own, **(normed if turned[i] else plain), chunk=chunk if chunks[i] else None)
        for i in range(count)
    )


def read_whole(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model of a config that also has a vision model."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError("text_config of config.json is missing, and Llama 4 is described there (llama4).")
    kept = ("eos_token_id", "tie_word_embeddings")
    return read({**{key: config[key] for key in kept if key in config}, **text}, family="llama4")


def _seen(spec: DecoderSpec, hf_name: str) -> bool:
    """What looks at pictures."""
    return hf_name.startswith(("vision_model.", "multi_modal_projector."))


FAMILIES = (
    Family(
        model_type="llama4_text",
        architectures=("Llama4ForCausalLM",),
        models="Llama 4, the text model alone",
        read=read,
        names=_NAMES,
    ),
    Family(
        model_type="llama4",
        architectures=("Llama4ForConditionalGeneration",),
        models="Llama 4 Scout and Maverick, their text model",
        read=read_whole,
        names=_NAMES | _INSIDE,
        spare=_seen,
    ),
)
