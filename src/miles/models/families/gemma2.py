"""Gemma 2: norms on both sides of each part, soft-capped scores and logits, every other layer with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that leaves these out, whatever the sizes.
_HEAD_DIM = 256
_SCALAR = 256.0
_WINDOW = 4096
_SCORE_CAP = 50.0
_LOGIT_CAP = 30.0

# Where Gemma's norms differ from what most call them.
NAMES = {"mlp_norm": "pre_feedforward_layernorm"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "gemma2")
    common, heads, rope = fields.common(tied=True), fields.heads(head_dim=_HEAD_DIM), fields.rope()
    bias = fields.flag("attention_bias")
    fields.only("hidden_activation", "gelu_pytorch_tanh")
    fields.only("use_bidirectional_attention", False, None)
    own = {"qkv_bias": bias, "output_bias": bias, "softcap": fields.bound("attn_logit_softcapping", _SCORE_CAP)}
    scale = (fields.bound("query_pre_attn_scalar", _SCALAR) or _SCALAR) ** -0.5
    mlp = MlpSpec(size=fields.whole("intermediate_size"), activation="gelu_tanh")
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, **own, rope=rope, scale=scale, window=window), ffn=mlp, post_norms=True)
        for window in fields.windows(always=True, default=_WINDOW, sliding=lambda i: i % 2 == 0)
    )
    cap = fields.bound("final_logit_softcapping", _LOGIT_CAP)
    fields.settle()
    root = common["hidden_size"] ** 0.5
    return DecoderSpec(**common, layers=layers, norm_offset=1.0, embedding_scale=root, logit_softcap=cap)


FAMILIES = (
    Family(
        model_type="gemma2",
        architectures=("Gemma2ForCausalLM",),
        models="Gemma 2",
        read=read,
        names=NAMES,
    ),
)
