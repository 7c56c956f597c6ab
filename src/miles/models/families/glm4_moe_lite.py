"""GLM-4.7-Flash: the GLM-4.5 mixture of experts over latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "glm4_moe_lite")
    if config.get("mlp_layer_types") is None:
        # transformers puts experts in every layer but the first, whatever this key says.
        fields.only("first_k_dense_replace", 1)
    mixer = latent.attention(fields, interleaved=fields.flag("rope_interleave", True))
    sparse = latent.sparse_from(fields, default=1)
    return latent.decoder(fields, len(sparse) * (mixer,), latent.sigmoid_experts(fields), sparse)


FAMILIES = (
    Family(
        model_type="glm4_moe_lite",
        architectures=("Glm4MoeLiteForCausalLM",),
        models="GLM-4.7-Flash",
        read=read,
        spare=latent.ahead,
    ),
)
