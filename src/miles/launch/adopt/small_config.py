"""Small config of a model: the same mechanisms in few, narrow layers, to compare implementations on a CPU. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import spec_from_config

_VOCABULARY = 512
_HIDDEN = 128
_HEADS = 4
_EXPERTS = 8
_WINDOW = 16
# Sizes of MLPs and experts; each becomes this at most.
_SIZES = {
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": 32,
    "index_n_heads": 16,  # with few of them, scores of 0 tie
    "q_lora_rank": 64,
    "o_groups": 2,
    "o_lora_rank": 32,
    "index_topk": _WINDOW,
    "sliding_window": _WINDOW,
    "attention_chunk_size": _WINDOW,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "mamba_num_heads": 4,
    "n_groups": 2,
    "laurel_rank": 16,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": _VOCABULARY,
    "ngram_vocab_size_base": _VOCABULARY,
    "split_ngram_parts": 8,
    "ple_embed_dim": 64,
}
# Lists with an entry for each layer.
_PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "no_rope_layers",
    "indexer_types",
    "moe_layer_freq",
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOKENS = ("bos_token_id", "eos_token_id")
_DROPPED = (
    "quantization_config",
    "auto_map",
    "torch_dtype",
    "dtype",
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
)


def shrink_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config of a few million parameters with every kind of layer of the given one; head sizes are kept.

    UsageError where the result is not a model of the same family: then the config has a constraint that is not known
    here.
    """
    layers, text = _count_layers(config), config.get("text_config")
    if isinstance(text, Mapping) and "vision_config" not in config:
        small = {key: value for key, value in config.items() if key not in _DROPPED}
        small["text_config"] = _shrink_text(text, layers)
    else:
        small = _shrink_text(config, layers)
    spec_from_config(small)
    return small


def _shrink_text(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    small = {key: value for key, value in config.items() if key not in _DROPPED}
    small["num_hidden_layers"] = layers
    small |= {key: value[:layers] for key in _PER_LAYER if isinstance(value := config.get(key), list | str)}
    if isinstance(moe_layers := config.get("moe_layers"), list):
        small["moe_layers"] = [i for i in moe_layers if i < layers]
    small |= {key: min(value, _SIZES[key]) for key in _SIZES if isinstance(value := config.get(key), int) and value}
    small |= _shrink_attention(config) | _shrink_experts(config)
    small |= {"vocab_size": _VOCABULARY, "pad_token_id": None}
    small |= {key: i for i, key in enumerate(_TOKENS) if config.get(key) is not None}
    return small | _shrink_groups(config, layers, small)


def _shrink_groups(config: Mapping[str, Any], layers: int, small: Mapping[str, Any]) -> dict[str, Any]:
    """What configs have in groups of their own: linear attention, with layers counted from one, and block selection."""
    found: dict[str, Any] = {}
    if isinstance(linear := config.get("linear_attn_config"), Mapping):
        lists = {key: [i for i in linear[key] if i <= layers] for key in ("full_attn_layers", "kda_layers")}
        found["linear_attn_config"] = {**linear, **lists, "num_heads": min(int(linear["num_heads"]), _HEADS)}
    if isinstance(sparse := config.get("sparse_attention_config"), Mapping):
        found["sparse_attention_config"] = {
            **sparse,
            "sparse_num_index_heads": small["num_key_value_heads"],
            "sparse_block_size": 4,
            "sparse_topk_blocks": 4,
            "sparse_attention_freq": list(sparse["sparse_attention_freq"])[:layers],
        }
    return found


def _count_layers(config: Mapping[str, Any]) -> int:
    """How many of the first layers have one of each kind."""
    layers = spec_from_config(config).layers
    kinds = set(layers)
    seen: set[Any] = set()
    for count, layer in enumerate(layers, 1):
        seen.add(layer)
        if seen == kinds:
            return max(2, count)
    raise AssertionError("every kind is among the layers")


def _shrink_attention(config: Mapping[str, Any]) -> dict[str, int]:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not isinstance(heads, int):
        raise UsageError("the config has no num_attention_heads")
    fewer = min(heads, _HEADS)
    found = {"num_attention_heads": fewer, "hidden_size": _HIDDEN}
    if isinstance(kv_heads, int):
        found["num_key_value_heads"] = 1 if kv_heads == 1 else fewer if kv_heads == heads else max(1, fewer // 2)
    if config.get("head_dim") is None and config.get("kv_lora_rank") is None:  # then it follows from the others
        found["hidden_size"] = fewer * (int(config["hidden_size"]) // heads)
    return found


def _shrink_experts(config: Mapping[str, Any]) -> dict[str, int]:
    key = next((key for key in _COUNTS if config.get(key)), None)
    if key is None:
        return {}
    groups, most = int(config.get("n_group") or 1), int(config.get("num_experts_per_tok") or 1)
    found = {key: min(_EXPERTS, int(config[key])), "num_experts_per_tok": min(most, 2)}
    if groups > 1:
        part = int(config.get("topk_group") or 1) / groups
        found |= {"n_group": 2, "topk_group": max(1, ceil(2 * part) if part < 1 else 2)}
    return found
