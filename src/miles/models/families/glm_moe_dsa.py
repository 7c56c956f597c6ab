"""GLM-5: latent attention that looks at chosen tokens; some layers take over the choice of one before them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from miles.models.families import latent
from miles.models.families.family import Family
from miles.models.families.fields import Fields
from miles.models.spec import DecoderSpec, MlaSpec

# transformers' defaults for a config without first_k_dense_replace and index_skip_topk_offset.
_DENSE_FIRST = 3
_OFFSET = 2
_LETTERS = {"F": "full", "S": "shared"}


def read(config: Mapping[str, Any]) -> DecoderSpec:
    fields = Fields(config, "glm_moe_dsa")
    fields.only("rope_interleave", True)
    fields.only("indexer_rope_interleave", True)
    mixer, scorer = latent.attention(fields, interleaved=True), latent.scorer(fields, interleaved=True)
    sparse = latent.sparse_from(fields, default=_DENSE_FIRST)
    latent.all_choose(fields)
    mixers = [replace(mixer, indexer=replace(scorer, source=source)) for source in _sources(fields)]
    return latent.decoder(fields, mixers, latent.sigmoid_experts(fields), sparse)


def _sources(fields: Fields) -> list[int | None]:
    """For each layer the one whose choice it takes over, None where it makes its own."""
    count, kinds = fields.whole("num_hidden_layers"), _kinds(fields)
    if len(kinds) != count:
        fields.refuse("indexer_types", f"names {len(kinds)} layers, but there are {count}")
    for kind in sorted(set(kinds) - set(_LETTERS.values())):
        fields.refuse("indexer_types", f"has a layer of kind {kind!r}, which is not implemented")
    if kinds[:1] == ["shared"]:
        fields.refuse("indexer_types", "lets the first layer share a choice that nobody made before it")
    sources: list[int | None] = []
    last: int | None = None
    for i, kind in enumerate(kinds):
        sources.append(last if kind == "shared" else None)
        last = i if kind == "full" else last
    return sources


def _kinds(fields: Fields) -> list[str]:
    """What each layer does: the list itself, a pattern of letters, or every so many layers."""
    config = fields.config
    told: Sequence[str] | None = config.get("indexer_types") or config.get("index_topk_pattern")
    if told is not None:
        return [_LETTERS.get(each, each) for each in told]
    count, every = fields.whole("num_hidden_layers"), fields.whole("index_topk_freq", 1)
    offset = fields.whole("index_skip_topk_offset", _OFFSET) if every > 1 else _OFFSET
    return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(count)]


def spare(spec: DecoderSpec, hf_name: str) -> bool:
    """Layers that guess further ahead, and a scorer in a layer that takes over another's choice."""
    return latent.ahead(spec, hf_name) or any(
        hf_name.startswith(f"model.layers.{i}.self_attn.indexer.")
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.mixer, MlaSpec)
        and layer.mixer.indexer is not None
        and layer.mixer.indexer.source is not None
    )


FAMILIES = (
    Family(
        model_type="glm_moe_dsa",
        architectures=("GlmMoeDsaForCausalLM",),
        models="GLM-5, 5.1, 5.2",
        read=read,
        spare=spare,
    ),
)
