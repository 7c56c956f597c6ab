"""DeepSeek-V3.2: DeepSeek-V3 whose layers each choose which tokens they look at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec

# transformers' default for a config without first_k_dense_replace.
_DENSE_FIRST = 3


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "deepseek_v32")
    fields.only("rope_interleave", True)
    fields.only("indexer_rope_interleave", False)
    fields.only("index_topk_freq", 1, None)
    mixer = replace(latent.attention(fields, interleaved=True), indexer=latent.scorer(fields, interleaved=False))
    sparse = latent.sparse_from(fields, default=_DENSE_FIRST)
    latent.all_choose(fields)
    return latent.decoder(fields, len(sparse) * (mixer,), latent.sigmoid_experts(fields), sparse)


FAMILIES = (
    Family(
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        models="DeepSeek-V3.2",
        read=read,
        spare=latent.ahead,
    ),
)
