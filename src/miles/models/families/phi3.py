"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections in the checkpoint, LongRoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# transformers' default for a config without the key.
_DEFAULTS = {"original_max_position_embeddings": 4096}
# Earlier releases of the models have other names for the rope type.
_ROPE_ALIASES = {"su": "longrope", "yarn": "longrope"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader({**_DEFAULTS, **config}, "phi3")
    common, heads = reader.common_args(eps=1e-5), reader.attention_heads()
    rope = reader.rope(head_dim=heads["head_dim"], aliases=_ROPE_ALIASES)
    if rope.kind not in ("default", "longrope"):
        reader.reject(reader.rope_group()[0], f"asks for rope type {rope.kind}, which this family does not have")
    reader.require("hidden_act", "silu")
    for dropout in ("resid_pdrop", "embd_pdrop"):
        reader.require(dropout, 0.0, None)
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=window), ffn=mlp)
        for window in reader.sliding_windows(always=True)
    )
    return reader.build_spec(common, layers)


FAMILIES = (
    ModelFamily(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        read=read,
        names={"qkv": "qkv_proj", "gate_up": "gate_up_proj"},
    ),
)
