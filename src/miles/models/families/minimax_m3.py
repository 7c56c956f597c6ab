"""MiniMax-M3, the text model: block-sparse attention by an indexer, sigmoid experts and clamped SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles.models.families import mixtral
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.families.vision_config import read_text_config
from miles.models.spec import AttentionSpec, BlockIndexerSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_HEAD_DIM = 128
_THETA = 5e6
_DENSE_SIZE = 12_288
_SHARED_SIZE = 3072
_SCALE = 2.0
_INDEXER = {
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
}
# Published configs have the indexer's keys in a group.
_GROUP = "sparse_attention_config"
_GROUP_KEYS = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
# The sigmoid gain and the limit of the clamped SwiGLU.
_ALPHA = 1.702
_LIMIT = 7.0
_SPARSE = "minimax_m3_sparse"


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(_rename_keys(read_text_config(config, {}, family="minimax_m3_vl")), "minimax_m3_vl")
    common, heads = reader.common_args(), reader.attention_heads(head_dim=_HEAD_DIM)
    # Published configs name the rotary channels; transformers' configs name their fraction of a head.
    rotary_dim = reader.positive_int("rotary_dim", heads["head_dim"])
    rope = reader.rope(head_dim=heads["head_dim"], theta=_THETA, partial=rotary_dim / heads["head_dim"])
    if "rotary_dim" in reader.config and rotary_dim != (rope.dim or heads["head_dim"]):
        reader.reject("rotary_dim", f"is {rotary_dim}, but partial_rotary_factor says {rope.dim or heads['head_dim']}")
    _require_supported(reader)
    own = {**heads, "rope": rope, "qk_norm": "head"}
    mixers = {"full_attention": AttentionSpec(**own)}
    kinds = reader.layer_types(_read_sparse_layers(reader), "full_attention", _SPARSE)
    if _SPARSE in kinds:
        mixers[_SPARSE] = AttentionSpec(**own, indexer=_read_indexer(reader, heads["num_kv_heads"], rope.dim))
    moe, mlp = _read_experts(reader), _read_mlp(reader, "dense_intermediate_size", _DENSE_SIZE)
    pairs = zip(kinds, _read_moe_layers(reader), strict=True)
    layers = (LayerSpec(mixer=mixers.get(kind), ffn=moe if sparse else mlp) for kind, sparse in pairs)
    return reader.build_spec(common, layers, norm_offset=1.0)


def _rename_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with the indexer's keys beside the others."""
    group = config.get(_GROUP) or {}
    return {**config, **{key: group[published] for published, key in _GROUP_KEYS.items() if published in group}}


def _require_supported(reader: ConfigReader) -> None:
    """Reject options of the published configs that are not implemented."""
    reader.require("hidden_act", "silu", "swigluoai")
    reader.require("swiglu_alpha", _ALPHA)
    reader.require("swiglu_limit", _LIMIT)
    reader.require("router_jitter_noise", 0.0, None)
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_head")
    reader.require("use_gemma_norm", True)
    reader.require("attention_output_gate", False, None)
    reader.require("n_shared_experts", 1)
    group = reader.config.get(_GROUP) or {}
    for key, allowed in (("sparse_init_block", (0, None)), ("sparse_score_type", ("max", None))):
        if group.get(key) not in allowed:
            reader.reject(f"{_GROUP}.{key}", f"is {group[key]!r}, but only {allowed[0]!r} is implemented")
    named = (group.get(key) for key in ("sparse_attention_freq", "sparse_disable_index_value"))
    lists: list[list[Any]] = [value if isinstance(value, list) else [] for value in named]
    if any(sparse and not disabled for sparse, disabled in zip(*lists, strict=False)):
        reader.reject(f"{_GROUP}.sparse_disable_index_value", "keeps the indexer's values, which is not implemented")


def _read_indexer(reader: ConfigReader, kv_heads: int, rotary_dim: int | None) -> BlockIndexerSpec:
    reader.require("index_n_heads", kv_heads)
    head_dim, block, top, local = (reader.positive_int(key, default) for key, default in _INDEXER.items())
    if head_dim < (rotary_dim or reader.positive_int("head_dim", _HEAD_DIM)):
        reader.reject("index_head_dim", f"is {head_dim}, fewer channels than RoPE rotates")
    if local > top:
        reader.reject("index_local_blocks", f"is {local}, more than the {top} blocks that are selected")
    return BlockIndexerSpec(head_dim=head_dim, block=block, top=top, local=local)


def _read_sparse_layers(reader: ConfigReader) -> Callable[[int], str]:
    """Return the type of a layer by its index, for a config without ``layer_types``."""
    freq = (reader.config.get(_GROUP) or {}).get("sparse_attention_freq")
    if freq is None:
        return lambda i: "full_attention"
    if len(freq) != reader.positive_int("num_hidden_layers"):
        reader.reject(f"{_GROUP}.sparse_attention_freq", f"names {len(freq)} layers, which is not their number")
        return lambda i: "full_attention"
    return lambda i: _SPARSE if freq[i] else "full_attention"


def _read_moe_layers(reader: ConfigReader) -> tuple[bool, ...]:
    """Read which layers have experts: all, unless the config lists them."""
    count = reader.positive_int("num_hidden_layers")
    kinds, freq = reader.config.get("mlp_layer_types"), reader.config.get("moe_layer_freq")
    key, listed = ("mlp_layer_types", kinds) if kinds is not None else ("moe_layer_freq", freq)
    if listed is None:
        return (True,) * count
    if len(listed) != count or not set(listed) <= {"sparse", "dense", 0, 1}:
        reader.reject(key, f"is {listed!r}, but must say for each of the {count} layers whether it has experts")
        return (True,) * count
    return tuple(kind in ("sparse", 1) for kind in listed)


def _read_experts(reader: ConfigReader) -> MoeSpec:
    return MoeSpec(
        **reader.expert_counts("num_local_experts", "num_experts"),
        size=reader.positive_int("intermediate_size"),
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
        scale=reader.number("routed_scaling_factor", _SCALE),
        activation="swiglu_clamped",
        shared=_read_mlp(reader, "shared_intermediate_size", _SHARED_SIZE),
    )


def _read_mlp(reader: ConfigReader, key: str, default: int) -> MlpSpec:
    return MlpSpec(size=reader.positive_int(key, default), activation="swiglu_clamped")


def _is_unused(spec: DecoderSpec, hf_name: str) -> bool:
    """The vision tower and its projectors, and multi-token-prediction layers."""
    if hf_name.startswith(("vision_tower.", "multi_modal_projector.", "patch_merge_mlp.")):
        return True
    return hf_name.startswith("mtp.") or ".mtp." in hf_name


FAMILIES = (
    ModelFamily(
        model_type="minimax_m3_vl",
        architectures=("MiniMaxM3SparseForConditionalGeneration",),
        models="MiniMax-M3, the text model",
        read=read,
        names={
            **mixtral.NAMES,
            "embedding": "language_model.model.embed_tokens",
            "layer": "language_model.model.layers.{}",
            "norm": "language_model.model.norm",
            "lm_head": "language_model.lm_head",
            "correction": "e_score_correction_bias",
        },
        is_unused=_is_unused,
        # transformers writes the MLP of dense layers under the name of the experts.
        renames={f".block_sparse_moe.{part}_proj.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
    ),
)
