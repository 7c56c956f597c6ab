"""DeepSeek-V2: latent attention, and experts scored by a softmax that is never normalised again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "deepseek_v2")
    fields.only("scoring_func", "softmax")
    fields.only("norm_topk_prob", False, None)
    fields.only("topk_method", "greedy", "group_limited_greedy")
    group_top = 1 if config.get("topk_method") == "group_limited_greedy" else None
    bias = fields.flag("mlp_bias")
    moe = latent.experts(fields, group_top=group_top, shared_bias=bias, norm_topk_prob=False, wide_router=True)
    mixer = latent.attention(fields, interleaved=True)
    sparse = latent.sparse_from(fields, default=0)
    return latent.decoder(fields, len(sparse) * (mixer,), moe, sparse, mlp_bias=bias)


FAMILIES = (
    Family(
        model_type="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        models="DeepSeek-V2, V2.5, V2-Lite, Coder-V2",
        read=read,
    ),
)
