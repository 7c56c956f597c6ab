"""Mistral, Ministral, ERNIE 4.5, Hunyuan, Phi-3, SmolLM3, Gemma 2 to 4, GLM-4: windows, soft-caps, every rotation."""

from tests.models.small_families.small import Kind
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 8.0,
    "beta_slow": 0.5,
}
# Lengths of the factors are for heads of 16 channels, three quarters of which turn.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3, 1.7, 2.0, 2.5],
    "long_factor": [1.0, 1.5, 2.5, 5.0, 9.0, 16.0],
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "pad_token_id": None}
# transformers trains no embedding of the padding token.
ERNIE = {"pad_token_id": None}
GEMMA4 = {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": None,
}

KINDS = {
    "ernie 4.5": Kind(Ernie4_5ForCausalLM, Ernie4_5Config, ERNIE | {"head_dim": 16, "rms_norm_eps": 1e-4}),
    "ernie 4.5 with biases, stretched": Kind(
        Ernie4_5ForCausalLM,
        Ernie4_5Config,
        ERNIE | {"head_dim": 8, "use_bias": True, "tie_word_embeddings": False, "rope_parameters": LINEAR},
    ),
    "hunyuan": Kind(
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config,
        {
            "head_dim": 16,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0},
        },
    ),
    "hunyuan tied with biases": Kind(
        HunYuanDenseV1ForCausalLM,
        HunYuanDenseV1Config,
        {"head_dim": 8, "pad_token_id": None, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "mistral": Kind(MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "mistral windowed": Kind(
        MistralForCausalLM, MistralConfig, {"sliding_window": 9, "head_dim": 16, "rms_norm_eps": 1e-5}
    ),
    "mistral with yarn": Kind(
        MistralForCausalLM, MistralConfig, {"sliding_window": None, "head_dim": 16, "rope_parameters": YARN}
    ),
    "mistral with yarn and a scale of its own": Kind(
        MistralForCausalLM,
        MistralConfig,
        {
            "sliding_window": None,
            "head_dim": 16,
            "rope_parameters": YARN | {"mscale": 1.2, "mscale_all_dim": 0.6, "truncate": False},
        },
    ),
    "mistral with dynamic rope": Kind(
        MistralForCausalLM,
        MistralConfig,
        {"sliding_window": None, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}},
    ),
    "ministral": Kind(
        MinistralForCausalLM,
        MinistralConfig,
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral 3": Kind(
        Ministral3ForCausalLM,
        Ministral3Config,
        {
            "head_dim": 16,
            "pad_token_id": None,
            "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
        },
    ),
    "phi3": Kind(Phi3ForCausalLM, Phi3Config, {"sliding_window": 11, "pad_token_id": None}),
    "phi3 tied, part of a head turned": Kind(
        Phi3ForCausalLM,
        Phi3Config,
        {
            "head_dim": 8,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
        },
    ),
    "phi3 longrope, short": Kind(
        Phi3ForCausalLM,
        Phi3Config,
        {
            "hidden_size": 64,
            "pad_token_id": None,
            "rope_parameters": LONGROPE,
            "original_max_position_embeddings": 256,
        },
    ),
    "smollm3": Kind(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "pad_token_id": None},
    ),
    "smollm3 untied, windowed, with biases": Kind(
        SmolLM3ForCausalLM,
        SmolLM3Config,
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "pad_token_id": None,
        },
    ),
    "gemma2": Kind(
        Gemma2ForCausalLM,
        Gemma2Config,
        GEMMA | {"sliding_window": 10, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma2 untied, with biases, without caps": Kind(
        Gemma2ForCausalLM,
        Gemma2Config,
        GEMMA
        | {
            "sliding_window": 5,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": Kind(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GEMMA
        | {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": LINEAR | {"rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma3 with a cap on logits": Kind(
        Gemma3ForCausalLM, Gemma3TextConfig, GEMMA | {"sliding_window": 4, "final_logit_softcapping": 4.0}
    ),
    "gemma4": Kind(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4 with values of their own": Kind(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4
        | {
            "global_head_dim": 8,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.5,
                    "factor": 2.0,
                    "rope_theta": 1e5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4 with per-layer inputs and shared keys": Kind(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4
        | {
            "num_hidden_layers": 5,
            "global_head_dim": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] + 2 * ["full_attention"],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 53,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4 with per-layer inputs": Kind(
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GEMMA4
        | {
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 60,
        },
    ),
    "glm": Kind(GlmForCausalLM, GlmConfig, {"head_dim": 16, "pad_token_id": None}),
    "glm without biases, tied": Kind(
        GlmForCausalLM,
        GlmConfig,
        {
            "head_dim": 16,
            "pad_token_id": None,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        },
    ),
    "glm4": Kind(Glm4ForCausalLM, Glm4Config, {"head_dim": 8, "pad_token_id": None}),
    "glm4 with yarn": Kind(
        Glm4ForCausalLM,
        Glm4Config,
        {"head_dim": 16, "pad_token_id": None, "rope_parameters": YARN | {"partial_rotary_factor": 0.5}},
    ),
}
