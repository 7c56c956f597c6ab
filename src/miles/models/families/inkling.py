"""Inkling, the text model: attention with a relative position bias, short convolutions, and weighed shared experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import read_text_config
from miles.models.spec import DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RelativeAttentionSpec

_TEXT = "inkling_text"
_WHOLE = "inkling_mm_model"
_FULL, _SLIDING = "hybrid", "hybrid_sliding"
# transformers' defaults for a config that does not name them.
_DEFAULTS: Mapping[str, Any] = {
    "eos_token_id": 2,
    "max_position_embeddings": 131_072,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_alpha": 0.1,
    "conv_kernel_size": 4,
    "logits_mup_width_multiplier": 24.0,
}
_DENSE_SIZE, _EXPERT_SIZE = 24_576, 3072
_HEADS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
_SLIDING_HEADS = {"swa_num_attention_heads": 64, "swa_num_key_value_heads": 16, "swa_head_dim": 128}
# Options of published configs of which only these values are implemented.
_REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "shared_expert_sink": (True,),
    "use_embed_norm": (True,),
    "use_sconv": (True,),
    "use_gate_bias": (True,),
    "use_global_scale": (True,),
    "norm_after_topk": (True,),
    "gate_activation": ("sigmoid",),
    "q_bias": (False,),
    "o_bias": (False,),
    "final_logit_softcapping": (None,),
}
# What published configs call these keys.
_ALIASES = {
    "sconv_kernel_size": "conv_kernel_size",
    "model_max_length": "max_position_embeddings",
    "sliding_window": "sliding_window_size",
    "num_local_experts": "n_routed_experts",
    "embedding_multiplier": "logits_mup_width_multiplier",
}
# Every sixth layer attends to all tokens, unless the config lists the layers that do not.
_PERIOD = 6


def read_text(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model alone, as transformers writes it."""
    return _read(config, _TEXT, interleaved=False)


def read_whole(config: Mapping[str, Any]) -> DecoderSpec:
    """The text model of a published checkpoint, whose gates and ups alternate."""
    return _read(read_text_config(config, {}, family=_WHOLE), _WHOLE, interleaved=True)


def _read(config: Mapping[str, Any], family: str, *, interleaved: bool) -> DecoderSpec:
    given = {key: value for key, value in config.items() if value is not None}
    renamed = {key: given[published] for published, key in _ALIASES.items() if published in given}
    reader = ConfigReader({**_DEFAULTS, **given, **renamed}, family)
    common = {**reader.common_args(), "tie_embeddings": False}  # the output weight is never the embedding
    for key, allowed in _REQUIRED.items():
        reader.require(key, *allowed)
    kernel = _read_kernel(reader)
    mixers = {_FULL: _read_full(reader, kernel), _SLIDING: _read_sliding(reader, kernel)}
    dense_size, expert_size = _read_sizes(reader)
    mlp = MlpSpec(size=dense_size, interleaved=interleaved, learned_scale=True)
    moe = _read_experts(reader, expert_size, interleaved=interleaved)
    sparse = _read_sparse_layers(reader)
    pairs = zip(_read_layer_types(reader), sparse, strict=True)
    layers = [
        LayerSpec(mixer=mixers.get(kind), ffn=moe if has_experts else mlp, output_kernel=kernel)
        for kind, has_experts in pairs
    ]
    divisor = reader.optional_positive("logits_mup_width_multiplier")
    padding = _read_padding(reader)
    common["vocab_size"] -= padding
    return reader.build_spec(common, layers, embedding_norm=True, output_divisor=divisor or 1.0, vocab_padding=padding)


def _read_kernel(reader: ConfigReader) -> int:
    kernel = reader.positive_int("conv_kernel_size")
    if kernel < 2:
        reader.reject("conv_kernel_size", f"is {kernel}, but a short convolution has at least 2 taps")
    return max(2, kernel)


def _read_full(reader: ConfigReader, kernel: int) -> RelativeAttentionSpec:
    """Read attention to all tokens, whose scores grow with the logarithm of their number if the config says so."""
    floor = reader.optional_positive("log_scaling_n_floor")
    temperature = None if floor is None else (floor, reader.number("log_scaling_alpha", 0.1))
    extent = reader.positive_int("rel_extent")
    return _build_mixer(reader, _HEADS, kernel, extent=extent, temperature=temperature)


def _read_sliding(reader: ConfigReader, kernel: int) -> RelativeAttentionSpec:
    """Read sliding windows, which have a bias for all of their distances."""
    window = reader.positive_int("sliding_window_size")
    return _build_mixer(reader, _SLIDING_HEADS, kernel, extent=window, window=window)


def _build_mixer(reader: ConfigReader, keys: Mapping[str, int], kernel: int, **own: Any) -> RelativeAttentionSpec:
    (_, (kv_key, _), _) = keys.items()
    heads, kv_heads, head_dim = (reader.positive_int(key, default) for key, default in keys.items())
    if heads % kv_heads:
        reader.reject(kv_key, f"is {kv_heads}, which does not divide the {heads} attention heads")
        kv_heads = heads
    rank = reader.positive_int("d_rel")
    return RelativeAttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, rank=rank, kernel=kernel, **own
    )


def _read_sizes(reader: ConfigReader) -> tuple[int, int]:
    """Read the width of an MLP and of an expert, which published configs call ``intermediate_size``."""
    if "dense_intermediate_size" not in reader.config:
        dense = reader.positive_int("intermediate_size", _DENSE_SIZE)
        return dense, reader.positive_int("moe_intermediate_size", _EXPERT_SIZE)
    expert = reader.positive_int("intermediate_size", _EXPERT_SIZE)
    return reader.positive_int("dense_intermediate_size"), reader.positive_int("moe_intermediate_size", expert)


def _read_experts(reader: ConfigReader, size: int, *, interleaved: bool) -> MoeSpec:
    return MoeSpec(
        **reader.expert_counts("n_routed_experts"),
        size=size,
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
        scale=reader.number("route_scale", 8.0),
        interleaved=interleaved,
        weighed_shared=reader.positive_int("n_shared_experts"),
    )


def _read_layer_types(reader: ConfigReader) -> Sequence[str]:
    listed = reader.config.get("local_layer_ids")
    local = None if listed is None else frozenset(listed)
    return reader.layer_types(
        lambda i: (_FULL, _SLIDING)[(i + 1) % _PERIOD > 0 if local is None else i in local], _FULL, _SLIDING
    )


def _read_sparse_layers(reader: ConfigReader) -> Sequence[bool]:
    """Read which layers have experts: all from ``dense_mlp_idx`` on, unless the config lists them."""
    count, kinds = reader.positive_int("num_hidden_layers"), reader.config.get("mlp_layer_types")
    if kinds is None:
        first = reader.layer_index("dense_mlp_idx", 0)
        return [i >= first for i in range(count)]
    if len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        reader.reject("mlp_layer_types", f"is {kinds!r}, but must name each of the {count} layers dense or sparse")
        return [True] * count
    return [kind == "sparse" for kind in kinds]


def _read_padding(reader: ConfigReader) -> int:
    """Read how many rows of the embedding and of the output weight are behind those of tokens."""
    rows = reader.positive_int("vocab_size")
    return max(0, rows - reader.positive_int("unpadded_vocab_size", rows))


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """The towers of images and audio, and multi-token-prediction layers."""
    return hf_name.startswith(("model.visual.", "model.audio.", "model.mtp.", "mtp."))


FAMILIES = (
    ModelFamily(
        model_type=_TEXT,
        architectures=("InklingForCausalLM",),
        models="Inkling, the text model alone",
        read=read_text,
        names={"stacked": "rows"},
        is_unused=_is_unused,
    ),
    ModelFamily(
        model_type=_WHOLE,
        architectures=("InklingForConditionalGeneration",),
        models="Inkling, text only",
        read=read_whole,
        names={
            "embedding": "model.llm.embed",
            "embedding_norm": "model.llm.embed_norm",
            "layer": "model.llm.layers.{}",
            "norm": "model.llm.norm",
            "lm_head": "model.llm.unembed",
            "attention_norm": "attn_norm",
            "mlp_norm": "mlp_norm",
            "attention_conv": "attn_sconv",
            "mlp_conv": "mlp_sconv",
            "relative": "attn",
            "q": "wq_du",
            "k": "wk_dv",
            "v": "wv_dv",
            "o": "wo_ud",
            "relative_weights": "wr_du",
            "k_conv": "k_sconv",
            "v_conv": "v_sconv",
            "gate_up": "w13_dn",
            "down": "w2_md",
            "correction": "gate.bias",
            "stacked": "rows",
            "experts_gate_up": "experts.w13_weight",
            "experts_down": "experts.w2_weight",
            "weighed_gate_up": "shared_experts.shared_w13_weight",
            "weighed_down": "shared_experts.shared_w2_weight",
        },
        is_unused=_is_unused,
    ),
)
