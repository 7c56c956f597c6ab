"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: fused projections on disk, long contexts by two sets of rotary factors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

# What transformers takes for a config that leaves it out.
_DEFAULTS = {"original_max_position_embeddings": 4096}
# Earlier releases of the models had other names for it.
_CALLED = {"su": "longrope", "yarn": "longrope"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields({**_DEFAULTS, **config}, "phi3")
    common, heads = fields.common(eps=1e-5), fields.heads()
    rope = fields.rope(head_dim=heads["head_dim"], called=_CALLED)
    if rope.kind not in ("default", "longrope"):
        fields.refuse(fields.rotary()[0], f"asks for rope type {rope.kind}, which this family does not have")
    fields.only("hidden_act", "silu")
    for dropout in ("resid_pdrop", "embd_pdrop"):
        fields.only(dropout, 0.0, None)
    mlp = MlpSpec(size=fields.whole("intermediate_size"))
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, window=window), ffn=mlp)
        for window in fields.windows(always=True)
    )
    fields.settle()
    return DecoderSpec(**common, layers=layers)


FAMILIES = (
    Family(
        model_type="phi3",
        architectures=("Phi3ForCausalLM",),
        models="Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
        read=read,
        names={"qkv": "qkv_proj", "gate_up": "gate_up_proj"},
    ),
)
