"""Qwen2 and Qwen2.5 (biases on queries, keys and values), MiMo, Qwen1.5-MoE and Qwen2-MoE (gated shared expert)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles.models.families.base import ModelFamily, MtpLayout
from miles.models.families.config_reader import ConfigReader, write_common_config, write_window_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config that does not name them.
_MAX_WINDOW_LAYERS = 28
_WINDOW = 4096
_SHARED_SIZE = 5632

_MIMO_MTP = MtpLayout(
    block="model.mtp_layers.{}",
    layer="model.mtp_layers.{}",
    embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm",
    projection="input_proj",
    norm="final_layernorm",
    hidden_first=True,
)


def read_dense(
    config: Mapping[str, Any], family: str = "qwen2", *, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """Read Qwen2; ``mrope`` are the default sections of multimodal RoPE, which vision-language models have."""
    reader = ConfigReader(config, family)
    common = reader.common_args()
    heads = reader.attention_heads()
    rope = reader.rope(mrope=mrope, aliases=None if mrope is None else {"mrope": "default"})
    reader.require("hidden_act", "silu")
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    first = reader.layer_index("max_window_layers", _MAX_WINDOW_LAYERS)
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, qkv_bias=True, window=window), ffn=mlp)
        for window in reader.sliding_windows(first=first, default=_WINDOW)
    )
    return reader.build_spec(common, layers)


def write_dense(spec: DecoderSpec) -> dict[str, Any]:
    return write_common_config(spec) | write_window_config(spec)


def read_moe(config: Mapping[str, Any]) -> DecoderSpec:
    reader = ConfigReader(config, "qwen2_moe")
    common = reader.common_args()
    heads = reader.attention_heads()
    rope = reader.rope()
    reader.require("hidden_act", "silu")
    moe = MoeSpec(
        **reader.expert_counts("num_experts"),
        size=reader.positive_int("moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob"),
        shared=MlpSpec(size=reader.positive_int("shared_expert_intermediate_size", _SHARED_SIZE)),
        shared_gate=True,
    )
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    before = reader.layer_index("max_window_layers", _MAX_WINDOW_LAYERS)
    windows = reader.sliding_windows(default=_WINDOW, sliding=lambda i: i % 2 == 0 and i < before)
    bias = reader.flag("qkv_bias", True)
    layers = tuple(
        LayerSpec(mixer=AttentionSpec(**heads, rope=rope, qkv_bias=bias, window=window), ffn=moe if sparse else mlp)
        for window, sparse in zip(windows, reader.sparse_step_layers(), strict=True)
    )
    return reader.build_spec(common, layers)


def _is_mimo_mtp(spec: DecoderSpec, hf_name: str) -> bool:
    """Multi-token-prediction layers of MiMo."""
    return hf_name.startswith("model.mtp_layers.")


FAMILIES = (
    ModelFamily(
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        models="Qwen2, Qwen2.5",
        read=read_dense,
        write=write_dense,
    ),
    ModelFamily(
        model_type="mimo",
        architectures=("MiMoForCausalLM",),
        models="MiMo-7B",
        read=partial(read_dense, family="mimo"),
        is_unused=_is_mimo_mtp,
        mtp=_MIMO_MTP,
    ),
    ModelFamily(
        model_type="qwen2_moe",
        architectures=("Qwen2MoeForCausalLM",),
        models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        read=read_moe,
        names={"shared": "shared_expert"},
    ),
)
