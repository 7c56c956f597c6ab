"""Small config of a model: the same mechanisms in few, narrow layers, to compare implementations on a CPU. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from miles.core.errors import UsageError
from miles.models.families import spec_from_config
from miles.models.spec import AttentionSpec, LayerSpec, MlpSpec

_VOCABULARY = 512
_HIDDEN = 128
_HEADS = 4
_EXPERTS = 8
_WINDOW = 16
_TOWER_SIZE = 2
# Sizes of MLPs and experts; each becomes this at most.
_SIZES = {
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "dense_intermediate_size": 128,
    "shared_intermediate_size": 64,
    "moe_intermediate_size": 48,  # stacked experts that are square would not say which way they are stored
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
# Layers and widths of a vision tower, by the names that families have for them.
_TOWER_LAYERS = ("depth", "num_hidden_layers", "layers", "vt_num_hidden_layers")
_TOWER_HEADS = ("num_heads", "num_attention_heads", "num_key_value_heads", "heads", "vt_num_attention_heads")
_TOWER_WIDTHS = ("hidden_size", "embed_dim", "width", "vt_hidden_size", "mm_hidden_size")
_TOWER_OUTPUTS = ("out_hidden_size", "text_hidden_size", "projection_hidden_size")
# Lists with an entry for each layer.
_PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "no_rope_layers",
    "indexer_types",
    "moe_layer_freq",
    "swiglu_limits",
    "swiglu_limits_shared",
    "rope_theta",
    "partial_rotary_factors",
)
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
# Lists with the same value for each layer, where a config has one.
_SAME_IN_LAYERS = ("moe_intermediate_size", "moe_topk", "num_shared_expert")
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
    config = _move_limits(config)
    layers, text = _count_layers(config), config.get("text_config")
    if isinstance(text, Mapping):
        small = {key: value for key, value in config.items() if key not in _DROPPED}
        small["text_config"] = _shrink_text(text, layers)
        hidden = small["text_config"]["hidden_size"]
    else:
        small = _shrink_text(config, layers)
        hidden = small["hidden_size"]
    if isinstance(tower := config.get("vision_config"), Mapping):
        small["vision_config"] = _shrink_tower(tower, hidden)
    spec_from_config(small)
    return small


def _move_limits(config: Mapping[str, Any]) -> dict[str, Any]:
    """Step's limits of gates, which the last layers alone have, in the same places of an earlier four layers."""
    if isinstance(text := config.get("text_config"), Mapping):
        return {**config, "text_config": _move_limits(text)}
    moved = dict(config)
    for key in ("swiglu_limits", "swiglu_limits_shared"):
        limits = config.get(key) or []
        limited = [i for i, limit in enumerate(limits) if limit]
        if limited:
            shift = max(0, limited[0] - 4) // 4 * 4
            moved[key] = [limits[i + shift] if i + shift in limited else 0.0 for i in range(len(limits))]
    return moved


def _shrink_tower(config: Mapping[str, Any], hidden: int) -> dict[str, Any]:
    """A vision tower of two layers with heads of the same size, for a text model of ``hidden`` channels."""
    heads = next((config[key] for key in _TOWER_HEADS if config.get(key)), None)
    small = dict(config)
    small |= {key: _TOWER_SIZE for key in _TOWER_LAYERS if key in config}
    small |= {key: hidden for key in _TOWER_OUTPUTS if config.get(key)}
    if heads:
        small |= {key: _TOWER_SIZE for key in _TOWER_HEADS if key in config}
        small |= {key: config[key] // heads * _TOWER_SIZE for key in _TOWER_WIDTHS if config.get(key)}
    if "embed_dim" in config and "hidden_size" in config:  # the second is then that of the text model
        small["hidden_size"] = hidden
    small |= {key: _HIDDEN for key in ("intermediate_size", "vt_intermediate_size") if config.get(key)}
    if config.get("deepstack_visual_indexes"):
        small["deepstack_visual_indexes"] = [0]
    if config.get("fullatt_block_indexes"):
        small["fullatt_block_indexes"] = [1]
    return small


def _shrink_text(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    small = {key: value for key, value in config.items() if key not in _DROPPED}
    small["num_hidden_layers"] = layers
    small |= {key: value[:layers] for key in _PER_LAYER if isinstance(value := config.get(key), list | str)}
    if isinstance(moe_layers := config.get("moe_layers"), list):
        small["moe_layers"] = [i for i in moe_layers if i < layers]
    if isinstance(numbers := config.get("moe_layers_enum"), str):
        small["moe_layers_enum"] = ",".join(i for i in numbers.split(",") if int(i) < layers)
    for key in _SAME_IN_LAYERS:
        if isinstance(each := config.get(key), list) and len(set(each)) == 1:
            config = {**config, key: each[0]}
            small[key] = each[0]
    small |= {key: min(value, _SIZES[key]) for key in _SIZES if isinstance(value := config.get(key), int) and value}
    if config.get("moe_intermediate_size") and config["moe_intermediate_size"] == config.get("intermediate_size"):
        small["moe_intermediate_size"] = small["intermediate_size"]  # Hunyuan has one size by two names
    small |= _shrink_attention(config) | _shrink_experts(config)
    small |= {"vocab_size": _VOCABULARY, "pad_token_id": None}
    if isinstance(rotary := config.get("rotary_dim"), int) and config.get("head_dim"):
        # Published configs name the rotary channels; transformers reads the fraction alone.
        small.setdefault("partial_rotary_factor", rotary / config["head_dim"])
    small |= {key: i for i, key in enumerate(_TOKENS) if config.get(key) is not None}
    if config.get("attention_head_dim") and not config.get("head_dim"):
        small["head_dim"] = config["attention_head_dim"]  # transformers' Hunyuan reads the second alone
    if config.get("num_kv_shared_layers"):
        small |= _choose_layers(config)
    return small | _shrink_groups(config, layers, small)


def _choose_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """One layer of each kind of Gemma 3n and 4, whose last layers take keys and values from any before them.

    The first layers until all kinds were seen would be so many that rounding grows beyond the tolerance.
    """
    chosen: dict[tuple[Any, ...], LayerSpec] = {}
    for layer in spec_from_config(config).layers:
        assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MlpSpec)
        chosen.setdefault((layer.mixer.window is None, layer.mixer.kv_source is None, layer.ffn.sparsity), layer)
    mixers = [layer.mixer for layer in chosen.values() if isinstance(layer.mixer, AttentionSpec)]
    found: dict[str, Any] = {
        "num_hidden_layers": len(chosen),
        "num_kv_shared_layers": sum(mixer.kv_source is not None for mixer in mixers),
        "layer_types": ["full_attention" if mixer.window is None else "sliding_attention" for mixer in mixers],
    }
    if config.get("laurel_rank"):
        found["activation_sparsity_pattern"] = [sparsity for _, _, sparsity in chosen]
    return found


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


def _shrink_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if not isinstance(heads, int):
        raise UsageError("the config has no num_attention_heads")
    fewer = min(heads, _HEADS)
    found: dict[str, Any] = {"num_attention_heads": fewer, "hidden_size": _HIDDEN}
    if isinstance(kv_heads, int):
        found["num_key_value_heads"] = 1 if kv_heads == 1 else fewer if kv_heads == heads else max(1, fewer // 2)
    if isinstance(groups := config.get("num_attention_groups"), int):  # Step's word for key-value heads
        found["num_attention_groups"] = fewer_groups = max(1, fewer // 2) if groups < heads else fewer
        if isinstance(other := config.get("attention_other_setting"), Mapping):
            more = {"num_attention_heads": fewer + fewer_groups, "num_attention_groups": fewer_groups}
            found["attention_other_setting"] = {**other, **more}
    if config.get("head_dim") is None and config.get("kv_lora_rank") is None:  # then it follows from the others
        found["hidden_size"] = fewer * (int(config["hidden_size"]) // heads)
    return found


def _shrink_experts(config: Mapping[str, Any]) -> dict[str, int]:
    key = next((key for key in _COUNTS if config.get(key)), None)
    if key is None:
        return {}
    each = next((name for name in _PER_TOKEN if config.get(name)), "num_experts_per_tok")
    groups, most = int(config.get("n_group") or 1), int(config.get(each) or 1)
    found = {key: min(_EXPERTS, int(config[key])), each: min(most, 2)}
    if groups > 1:
        part = int(config.get("topk_group") or 1) / groups
        found |= {"n_group": 2, "topk_group": max(1, ceil(2 * part) if part < 1 else 2)}
    return found
