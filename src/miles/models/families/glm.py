"""GLM-4 9B and GLM-4-0414, dense: half of each head turns, by neighbouring pairs; the later one norms twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_HEAD_DIM = 128
_EPS = 1.5625e-7
_PART = 0.5


def _read(fields: Fields, *, post_norms: bool) -> DecoderSpec:
    common, heads = fields.common(eps=_EPS), fields.heads(head_dim=_HEAD_DIM)
    rope = fields.rope(head_dim=heads["head_dim"], interleaved=True, partial=_PART)
    fields.only("hidden_act", "silu")
    attention = AttentionSpec(**heads, rope=rope, qkv_bias=fields.flag("attention_bias", True))
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    layer = LayerSpec(mixer=attention, ffn=mlp, post_norms=post_norms)
    layers = fields.whole("num_hidden_layers") * (layer,)
    fields.settle()
    return DecoderSpec(**common, layers=layers)


def read(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(Fields(config, "glm"), post_norms=False)


def read_glm4(config: Mapping[str, Any]) -> DecoderSpec:
    return _read(Fields(config, "glm4"), post_norms=True)


FAMILIES = (
    Family(
        model_type="glm",
        architectures=("GlmForCausalLM",),
        models="GLM-4 9B, GLM-Edge",
        read=read,
        names={"gate_up": "gate_up_proj"},
    ),
    Family(
        model_type="glm4",
        architectures=("Glm4ForCausalLM",),
        models="GLM-4-0414, GLM-Z1",
        read=read_glm4,
        names={
            "gate_up": "gate_up_proj",
            "attention_post_norm": "post_self_attn_layernorm",
            "mlp_post_norm": "post_mlp_layernorm",
        },
    ),
)
