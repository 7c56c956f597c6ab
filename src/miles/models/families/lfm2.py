"""LFM2, dense and with a mixture of experts: gated short convolutions in most layers, attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, ShortConvSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_THETA = 1_000_000.0
_EPS = 1e-5
_KERNEL = 3
_MULTIPLE_OF = 256
_DENSE_LAYERS = 2

_NAMES = {
    "norm": "model.embedding_norm",
    "attention_norm": "operator_norm",
    "mlp_norm": "ffn_norm",
    "o": "out_proj",
    "q_norm": "q_layernorm",
    "k_norm": "k_layernorm",
    "conv": "conv",
    "mlp": "feed_forward",
    "gate": "w1",
    "up": "w3",
    "down": "w2",
    "moe": "feed_forward",
    "correction": "expert_bias",
    "expert_gate": "w1",
    "expert_up": "w3",
    "expert_down": "w2",
}


def read_dense(config: Mapping[str, Any]) -> DecoderSpec:
    """Layers that no key names have attention, as in transformers."""
    reader = _open(config, "lfm2")
    common, mlp = reader.common_args(eps=_EPS, tied=True), MlpSpec(size=_read_mlp_size(reader))
    attends = config.get("full_attn_idxs")
    mixers = _read_mixers(reader, lambda i: "full_attention" if attends is None or i in attends else "conv")
    return reader.build_spec(common, (LayerSpec(mixer=mixer, ffn=mlp) for mixer in mixers))


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    """Sigmoid experts in all layers but the first few; transformers adds 1e-6 to the sum of their weights."""
    reader = _open(config, "lfm2_moe")
    common, mlp = reader.common_args(eps=_EPS, tied=True), MlpSpec(size=reader.positive_int("intermediate_size"))
    if config.get("layer_types") is None:
        reader.reject("layer_types", "is missing, but must say which layers are convolutions")
    moe = MoeSpec(
        **reader.expert_counts("num_experts"),
        size=reader.positive_int("moe_intermediate_size"),
        score="sigmoid",
        norm_topk_prob=reader.flag("norm_topk_prob", True),
        correction=reader.flag("use_expert_bias", True),
        scale=reader.number("routed_scaling_factor", 1.0),
    )
    dense, mixers = reader.layer_index("num_dense_layers", _DENSE_LAYERS), _read_mixers(reader, lambda i: "conv")
    return reader.build_spec(
        common, (LayerSpec(mixer=mixer, ffn=mlp if i < dense else moe) for i, mixer in enumerate(mixers))
    )


def _open(config: Mapping[str, Any], family: str) -> ConfigReader:
    """Start reading, with the keys that only this family names otherwise under their common names."""
    own = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    return ConfigReader({**config, **{common: config[key] for key, common in own.items() if key in config}}, family)


def _read_mixers(reader: ConfigReader, default: Any) -> tuple[AttentionSpec | ShortConvSpec, ...]:
    heads = reader.attention_heads()
    attention = AttentionSpec(**heads, rope=reader.rope(theta=_THETA), qk_norm="head")
    convolution = ShortConvSpec(
        channels=reader.positive_int("hidden_size"),
        kernel=reader.positive_int("conv_L_cache", _KERNEL),
        bias=reader.flag("conv_bias"),
    )
    kinds = reader.layer_types(default, "conv", "full_attention")
    return tuple(convolution if kind == "conv" else attention for kind in kinds)


def _read_mlp_size(reader: ConfigReader) -> int:
    """Read the width of the MLP: two thirds of the size in the config, rounded up, unless it says otherwise."""
    size = reader.positive_int("intermediate_size")
    if not reader.flag("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    factor = reader.optional_positive("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = reader.positive_int("block_multiple_of", _MULTIPLE_OF)
    return multiple * -(-int(factor * size) // multiple)


FAMILIES = (
    ModelFamily(
        model_type="lfm2",
        architectures=("Lfm2ForCausalLM",),
        models="LFM2 350M, 700M, 1.2B, 2.6B",
        read=read_dense,
        names=_NAMES,
    ),
    ModelFamily(
        model_type="lfm2_moe",
        architectures=("Lfm2MoeForCausalLM",),
        models="LFM2-8B-A1B",
        read=read_moe,
        names=_NAMES,
    ),
)
