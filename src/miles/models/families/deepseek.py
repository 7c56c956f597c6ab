"""DeepSeek-V2, V3/R1 and V3.2, and models built like them (Kimi-K2, Moonlight): MLA with a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from miles.models.families import mla
from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader
from miles.models.spec import DecoderSpec

# transformers' default for a V3 config without first_k_dense_replace.
_FIRST_MOE_LAYER = 3


def read_v2(config: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek-V2: router scores are a softmax that is not renormalized over the selected experts."""
    reader = ConfigReader(config, "deepseek_v2")
    reader.require("scoring_func", "softmax")
    reader.require("norm_topk_prob", False, None)
    reader.require("topk_method", "greedy", "group_limited_greedy")
    group_top = 1 if config.get("topk_method") == "group_limited_greedy" else None
    bias = reader.flag("mlp_bias")
    moe = mla.read_experts(reader, group_top=group_top, shared_bias=bias, norm_topk_prob=False, wide_router=True)
    mixer = mla.read_mla(reader, interleaved=True)
    sparse = mla.read_moe_layers(reader, default=0)
    return mla.build_decoder_spec(reader, len(sparse) * (mixer,), moe, sparse, mlp_bias=bias)


def read_v3(config: Mapping[str, Any], family: str = "deepseek_v3") -> DecoderSpec:
    """DeepSeek-V3: sigmoid router scores, balanced by a correction bias that counts for the selection only."""
    reader = ConfigReader(config, family)
    mixer = mla.read_mla(reader, interleaved=reader.flag("rope_interleave", True))
    sparse = mla.read_moe_layers(reader, default=_FIRST_MOE_LAYER)
    return mla.build_decoder_spec(reader, len(sparse) * (mixer,), mla.read_sigmoid_experts(reader), sparse)


def read_v32(config: Mapping[str, Any]) -> DecoderSpec:
    """DeepSeek-V3.2: V3 with a sparse-attention indexer in every layer."""
    reader = ConfigReader(config, "deepseek_v32")
    reader.require("rope_interleave", True)
    reader.require("indexer_rope_interleave", False)
    reader.require("index_topk_freq", 1, None)
    mixer = replace(mla.read_mla(reader, interleaved=True), indexer=mla.read_indexer(reader, interleaved=False))
    sparse = mla.read_moe_layers(reader, default=_FIRST_MOE_LAYER)
    mla.require_sparse_attention(reader)
    return mla.build_decoder_spec(reader, len(sparse) * (mixer,), mla.read_sigmoid_experts(reader), sparse)


FAMILIES = (
    ModelFamily(
        model_type="deepseek_v2",
        architectures=("DeepseekV2ForCausalLM",),
        models="DeepSeek-V2, V2.5, V2-Lite, Coder-V2",
        read=read_v2,
    ),
    ModelFamily(
        model_type="deepseek_v3",
        architectures=("DeepseekV3ForCausalLM",),
        models="DeepSeek-V3, V3.1, R1; Kimi-K2; Moonlight",
        read=read_v3,
        is_unused=mla.is_mtp_layer,
        mtp=mla.MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="kimi_k2",
        architectures=("DeepseekV3ForCausalLM",),
        models="Kimi-K2, where its config names no architecture",
        read=partial(read_v3, family="kimi_k2"),
        is_unused=mla.is_mtp_layer,
        mtp=mla.MTP_LAYOUT,
    ),
    ModelFamily(
        model_type="deepseek_v32",
        architectures=("DeepseekV32ForCausalLM",),
        models="DeepSeek-V3.2",
        read=read_v32,
        is_unused=mla.is_mtp_layer,
        mtp=mla.MTP_LAYOUT,
    ),
)
