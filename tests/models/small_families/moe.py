"""Mixtral, Qwen2-MoE, ERNIE 4.5, Hunyuan, GLM-4.5, MiniMax-M2, gpt-oss, Llama 4, Gemma 4, Step-3.7: experts over
attention.
"""

from tests.models.small_families.small import Kind
from transformers import (
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    HunYuanMoEV1Config,
    HunYuanMoEV1ForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

EAGER = {"experts_implementation": "eager"}
MIXTRAL = EAGER | {"num_local_experts": 5, "num_experts_per_tok": 2}
QWEN2 = EAGER | {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 36,
}
GLM = EAGER | {
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
    "attention_bias": True,
    "routed_scaling_factor": 2.5,
    "partial_rotary_factor": 0.5,
}
MINIMAX = EAGER | {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 12}
ERNIE = EAGER | {
    "pad_token_id": None,  # transformers trains no embedding of the padding token
    "num_hidden_layers": 3,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 12,
    "moe_num_shared_experts": 2,
}
HUNYUAN = EAGER | {"head_dim": 16, "pad_token_id": None, "num_experts": 6, "moe_topk": 2}
OSS = EAGER | {"head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 16}
OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
LLAMA4 = EAGER | {
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size": 24,
    "intermediate_size_mlp": 40,
    "num_hidden_layers": 4,
    "attention_chunk_size": 16,
    "floor_scale": 16,
    "attn_scale": 0.3,
}
# The published ones have no band between the two frequencies.
LLAMA4_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
GEMMA4 = EAGER | {
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 0,
    "pad_token_id": None,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
STEP = EAGER | {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_sliding_attention_heads": 6,
    "sliding_window": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "share_expert_dim": 20,
    "moe_router_scaling_factor": 2.5,
    # Below what gates and ups reach in these models.
    "swiglu_limits": [None, 0.7, 0.0, 0.6],
    "swiglu_limits_shared": [0.8, 0.0, 0.6, 0.7],
    "rope_parameters": {
        "full_attention": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "partial_rotary_factor": 0.5,
            "factor": 2.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
            "original_max_position_embeddings": 64,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
STEP_TOWER = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "mlp_ratio": 2.0,
}


def step_config(*, attn_implementation: str, experts_implementation: str, **text) -> Step3p7Config:
    """Step-3.7 of this text model and a small tower."""
    return Step3p7Config(
        text_config=text,
        vision_config=dict(STEP_TOWER),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )


KINDS = {
    "mixtral": Kind(MixtralForCausalLM, MixtralConfig, MIXTRAL),
    "mixtral with a window": Kind(
        MixtralForCausalLM, MixtralConfig, MIXTRAL | {"sliding_window": 20, "tie_word_embeddings": True}
    ),
    "qwen2 moe": Kind(Qwen2MoeForCausalLM, Qwen2MoeConfig, QWEN2),
    "qwen2 moe in some layers, normalised": Kind(
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        QWEN2 | {"num_hidden_layers": 3, "decoder_sparse_step": 2, "norm_topk_prob": True, "qkv_bias": False},
    ),
    "qwen2 moe with windows": Kind(
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        QWEN2 | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2, "num_hidden_layers": 4},
    ),
    "glm-4.5": Kind(Glm4MoeForCausalLM, Glm4MoeConfig, GLM | {"use_qk_norm": True}),
    "glm-4.5 air, two shared": Kind(
        Glm4MoeForCausalLM, Glm4MoeConfig, GLM | {"n_shared_experts": 2, "norm_topk_prob": False}
    ),
    "glm-4.5 in groups": Kind(
        Glm4MoeForCausalLM, Glm4MoeConfig, GLM | {"n_group": 4, "topk_group": 2, "attention_bias": False}
    ),
    "minimax-m2": Kind(MiniMaxM2ForCausalLM, MiniMaxM2Config, MINIMAX | {"partial_rotary_factor": 0.5}),
    "minimax-m2 turning whole heads": Kind(MiniMaxM2ForCausalLM, MiniMaxM2Config, MINIMAX),
    "ernie 4.5 moe": Kind(Ernie4_5_MoeForCausalLM, Ernie4_5_MoeConfig, ERNIE),
    "ernie 4.5 moe in some layers, none shared": Kind(
        Ernie4_5_MoeForCausalLM,
        Ernie4_5_MoeConfig,
        ERNIE
        | {
            "num_hidden_layers": 5,
            "moe_layer_interval": 2,
            "moe_layer_end_index": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
    ),
    "hunyuan moe": Kind(
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config,
        HUNYUAN | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}},
    ),
    "hunyuan moe tied with biases, experts a token listed": Kind(
        HunYuanMoEV1ForCausalLM,
        HunYuanMoEV1Config,
        HUNYUAN | {"moe_topk": [3, 3], "attention_bias": True, "tie_word_embeddings": True},
    ),
    "gpt-oss": Kind(GptOssForCausalLM, GptOssConfig, OSS | {"rope_parameters": OSS_ROPE}),
    "gpt-oss without attention biases": Kind(
        GptOssForCausalLM,
        GptOssConfig,
        OSS | {"attention_bias": False, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "llama 4": Kind(Llama4ForCausalLM, Llama4TextConfig, LLAMA4 | {"rope_parameters": LLAMA4_ROPE}),
    "llama 4 with experts in some layers": Kind(
        Llama4ForCausalLM,
        Llama4TextConfig,
        LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "attention_bias": True},
    ),
    "llama 4 with two experts a token": Kind(
        Llama4ForCausalLM,
        Llama4TextConfig,
        LLAMA4
        | {
            "num_experts_per_tok": 2,
            "num_hidden_layers": 3,
            "no_rope_layers": [1, 0, 1],
            "attn_temperature_tuning": False,
        },
    ),
    "gemma4 with experts": Kind(
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
    "gemma4 with many experts a token": Kind(
        Gemma4ForCausalLM, Gemma4TextConfig, GEMMA4 | {"global_head_dim": 8, "top_k_experts": 5}
    ),
    "step 3.7": Kind(Step3p7ForConditionalGeneration, step_config, STEP),
    "step 3.7 with biases, a scale and no limits": Kind(
        Step3p7ForConditionalGeneration,
        step_config,
        STEP
        | {
            "attention_bias": True,
            "mlp_bias": True,
            "query_pre_attn_scalar": 24,
            "swiglu_limits": None,
            "swiglu_limits_shared": None,
            "num_sliding_attention_heads": None,
        },
    ),
}
