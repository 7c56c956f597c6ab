"""GLM-4.5, 4.6 and 4.7: half of a head turns, and experts balanced by a bias that counts for choosing alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' defaults for a config that does not name them.
_EPS = 1e-5
_TURNED = 0.5
_DENSE_FIRST = 1


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "glm4_moe")
    common, heads = fields.common(eps=_EPS), fields.heads()
    rope = fields.rope(head_dim=heads["head_dim"], partial=_TURNED)
    fields.only("hidden_act", "silu")
    attention = AttentionSpec(
        **heads,
        rope=rope,
        qk_norm="head" if fields.flag("use_qk_norm") else "none",
        qkv_bias=fields.flag("attention_bias"),
    )
    moe, mlp = latent.sigmoid_experts(fields), MlpSpec(size=fields.whole("intermediate_size"))
    sparse = latent.sparse_from(fields, default=_DENSE_FIRST)
    fields.settle()
    return DecoderSpec(**common, layers=tuple(LayerSpec(mixer=attention, ffn=moe if s else mlp) for s in sparse))


FAMILIES = (
    Family(
        model_type="glm4_moe",
        architectures=("Glm4MoeForCausalLM",),
        models="GLM-4.5, 4.5-Air, 4.6, 4.7",
        read=read,
        spare=latent.ahead,
    ),
)
