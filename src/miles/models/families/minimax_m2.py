"""MiniMax-M2: queries and keys are normalised over all heads at once, and experts are scored by a sigmoid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import latent, mixtral
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_HEAD_DIM = 128
_THETA = 5e6


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "minimax_m2")
    common, heads = fields.common(), fields.heads(head_dim=_HEAD_DIM)
    # The published configs name the channels that turn; transformers' own name the part they are of a head.
    turned = fields.whole("rotary_dim", heads["head_dim"])
    rope = fields.rope(head_dim=heads["head_dim"], theta=_THETA, partial=turned / heads["head_dim"])
    if "rotary_dim" in config and turned != (rope.dim or heads["head_dim"]):
        fields.refuse("rotary_dim", f"is {turned}, but partial_rotary_factor says {rope.dim or heads['head_dim']}")
    _only_what_is_there(fields)
    attention = AttentionSpec(**heads, rope=rope, qk_norm="all")
    moe = MoeSpec(
        **fields.experts("num_local_experts", "num_experts"),
        size=fields.whole("intermediate_size"),
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
    )
    layers = fields.whole("num_hidden_layers") * (LayerSpec(mixer=attention, ffn=moe),)
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def _only_what_is_there(fields: Fields) -> None:
    """Refuse what the published configs could say and this family does not do."""
    fields.only("hidden_act", "silu")
    fields.only("router_jitter_noise", 0.0, None)
    fields.only("scoring_func", "sigmoid")
    fields.only("use_routing_bias", True)
    fields.only("use_qk_norm", True)
    fields.only("qk_norm_type", "per_layer")
    fields.only("shared_intermediate_size", 0, None)
    fields.only("sliding_window", None)
    if set(fields.config.get("attn_type_list") or ()) - {1}:
        fields.refuse("attn_type_list", "has layers that are not softmax attention, which is not implemented")


FAMILIES = (
    Family(
        model_type="minimax_m2",
        architectures=("MiniMaxM2ForCausalLM",),
        models="MiniMax-M2, M2.1",
        read=read,
        names={**mixtral.NAMES, "correction": "e_score_correction_bias"},
        spare=latent.ahead,
    ),
)
