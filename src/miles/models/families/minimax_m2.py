"""MiniMax-M2: QK-norm over all heads at once, experts with sigmoid scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import mixtral, mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_HEAD_DIM = 128
_THETA = 5e6


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "minimax_m2")
    common, heads = reader.common_args(), reader.attention_heads(head_dim=_HEAD_DIM)
    # Published configs name the rotary channels; transformers' configs name their fraction of a head.
    rotary_dim = reader.positive_int("rotary_dim", heads["head_dim"])
    rope = reader.rope(head_dim=heads["head_dim"], theta=_THETA, partial=rotary_dim / heads["head_dim"])
    if "rotary_dim" in config and rotary_dim != (rope.dim or heads["head_dim"]):
        reader.reject("rotary_dim", f"is {rotary_dim}, but partial_rotary_factor says {rope.dim or heads['head_dim']}")
    _require_supported(reader)
    attention = AttentionSpec(**heads, rope=rope, qk_norm="all")
    moe = MoeSpec(
        **reader.expert_counts("num_local_experts", "num_experts"),
        size=reader.positive_int("intermediate_size"),
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
    )
    layers = reader.positive_int("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=moe),)
    return reader.build_spec(common, layers)


def _require_supported(reader: ConfigReader) -> None:
    """Reject options of the published configs that are not implemented."""
    reader.require("hidden_act", "silu")
    reader.require("router_jitter_noise", 0.0, None)
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_layer")
    reader.require("shared_intermediate_size", 0, None)
    reader.require("sliding_window", None)
    if set(reader.config.get("attn_type_list") or ()) - {1}:
        reader.reject("attn_type_list", "has layers that are not softmax attention, which is not implemented")


FAMILIES = (
    ModelFamily(
        model_type="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        models="MiniMax-M2, M2.1",
        read=read,
        names={**mixtral.NAMES, "correction": "e_score_correction_bias"},
        is_unused=mla.is_mtp_layer,
    ),
)
