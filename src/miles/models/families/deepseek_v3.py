"""DeepSeek-V3 and R1, and what was built like them (Kimi-K2 among others): experts balanced by a bias on the choice."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec

# transformers' default for a config without first_k_dense_replace.
_DENSE_FIRST = 3


def read(config: Mapping[str, Any], family: str = "deepseek_v3") -> DecoderSpec:
    fields = Fields(config, family)
    mixer = latent.attention(fields, interleaved=fields.flag("rope_interleave", True))
    sparse = latent.sparse_from(fields, default=_DENSE_FIRST)
    return latent.decoder(fields, len(sparse) * (mixer,), latent.sigmoid_experts(fields), sparse)


FAMILIES = (
    Family(
        model_type="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        models="DeepSeek-V3, V3.1, R1; Kimi-K2; Moonlight",
        read=read,
        spare=latent.ahead,
    ),
    Family(
        model_type="kimi_k2",
        architectures=("DeepseekV3ForCausalLM",),
        models="Kimi-K2, where its config names no architecture",
        read=partial(read, family="kimi_k2"),
        spare=latent.ahead,
    ),
)
