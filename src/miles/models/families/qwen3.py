"""Qwen3, dense and MoE: queries and keys are RMS-normalized per head before RoPE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles.models.families.base import ModelFamily
from miles.models.families.config_reader import ConfigReader, write_common_config, write_window_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec

# transformers' defaults for a config without head_dim, max_window_layers and sliding_window, whatever the sizes.
_HEAD_DIM = 128
_MAX_WINDOW_LAYERS = 28
_WINDOW = 4096


def _read_attention(
    reader: ConfigReader,
    heads: Mapping[str, Any],
    windows: tuple[int | None, ...],
    mrope: tuple[int, int, int] | None = None,
) -> list[AttentionSpec]:
    rope, bias = reader.rope(mrope=mrope, mrope_interleaved=mrope is not None), reader.flag("attention_bias")
    reader.require("hidden_act", "silu")
    return [
        AttentionSpec(**heads, rope=rope, qk_norm="head", qkv_bias=bias, output_bias=bias, window=window)
        for window in windows
    ]


def read_dense(
    config: Mapping[str, Any], family: str = "qwen3", *, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """Read Qwen3; ``mrope`` are the default sections of multimodal RoPE, which vision-language models have."""
    reader = ConfigReader(config, family)
    common, heads = reader.common_args(), reader.attention_heads(head_dim=_HEAD_DIM)
    first = reader.layer_index("max_window_layers", _MAX_WINDOW_LAYERS)
    mixers = _read_attention(reader, heads, reader.sliding_windows(first=first, default=_WINDOW), mrope)
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    return reader.build_spec(common, (LayerSpec(mixer=mixer, ffn=mlp) for mixer in mixers))


def write_dense(spec: DecoderSpec) -> dict[str, Any]:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    return write_common_config(spec) | write_window_config(spec) | {"attention_bias": mixer.qkv_bias}


def read_moe(
    config: Mapping[str, Any], family: str = "qwen3_moe", *, mrope: tuple[int, int, int] | None = None
) -> DecoderSpec:
    """Read Qwen3-MoE; ``mrope`` as in ``read_dense``."""
    reader = ConfigReader(config, family)
    common = reader.common_args()
    heads = reader.attention_heads()
    windows = reader.sliding_windows(default=_WINDOW)
    mixers = _read_attention(reader, heads, windows, mrope)
    moe = MoeSpec(
        **reader.expert_counts("num_experts", "num_local_experts"),
        size=reader.positive_int("moe_intermediate_size"),
        norm_topk_prob=reader.flag("norm_topk_prob"),
    )
    mlp = MlpSpec(size=reader.positive_int("intermediate_size"))
    if len(set(windows)) > 1:
        reader.reject("layer_types", "gives some layers a window and some none, which this family does not do")
    sparse = reader.sparse_step_layers()
    layers = tuple(LayerSpec(mixer=m, ffn=moe if s else mlp) for m, s in zip(mixers, sparse, strict=True))
    return reader.build_spec(common, layers)


def write_moe(spec: DecoderSpec) -> dict[str, Any]:
    moe = spec.moe
    if moe is None:  # every layer has an MLP, but the config needs all keys
        moe = MoeSpec(num_experts=1, experts_per_token=1, size=1, norm_topk_prob=False)
    return write_dense(spec) | {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.size,
        "norm_topk_prob": moe.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(spec.num_layers) if i not in spec.moe_layers],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
    }


FAMILIES = (
    ModelFamily(
        model_type="qwen3",
        architectures=("Qwen3ForCausalLM",),
        models="Qwen3, dense",
        read=read_dense,
        write=write_dense,
    ),
    ModelFamily(
        model_type="qwen3_moe",
        architectures=("Qwen3MoeForCausalLM",),
        models="Qwen3-MoE (30B-A3B, 235B-A22B)",
        read=read_moe,
        write=write_moe,
    ),
)
