"""Qwen3-Next, Qwen3.5, Nemotron-H, Kimi-Linear, GLM-5.3 and LFM2: layers whose past is a state."""

from tests.models.small_families.small import Kind
from transformers import (
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MOE = {
    "experts_implementation": "eager",
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
MROPE = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
}
# transformers takes time_step_min for the shortest step; the models were made with time_step_limit.
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 32,
    "time_step_min": 1e-12,
    "layer_norm_epsilon": 1e-4,
    "eos_token_id": None,
}
ROUTED = {
    "experts_implementation": "eager",
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}
# transformers trains no embedding of the padding token.
LFM2 = {"pad_token_id": None, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
LFM2_MOE = LFM2 | {
    "experts_implementation": "eager",
    "num_dense_layers": 1,
    "moe_intermediate_size": 12,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}
# Sizes all different, so that none can stand in for another.
KIMI = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "experts_implementation": "eager",
    "moe_intermediate_size": 12,
    "num_local_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "linear_head_dim": 7,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
# The selection and the pools are shorter than the sequences, limits are below what gates and ups reach.
GLM5_NEXT = {
    "pad_token_id": None,
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention", "deepseek_sparse_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "v_head_dim": 5,
    "index_n_heads": 16,
    "index_head_dim": 10,
    "index_topk": 12,
    "index_kpool": 4,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.7,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
}
GLM5_NEXT_TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
    "patch_size": 4,
    "image_size": 16,
}


def glm5_next_config(*, attn_implementation: str, experts_implementation: str = "eager", **text) -> Glm5NextConfig:
    """GLM-5.3 of this text model and a small tower."""
    return Glm5NextConfig(
        text_config=text,
        vision_config=dict(GLM5_NEXT_TOWER),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        attn_implementation=attn_implementation,
        experts_implementation=experts_implementation,
    )


KINDS = {
    "hybrid qwen3 next": Kind(
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        DELTA
        | MOE
        | {"num_hidden_layers": 3, "layer_types": None, "full_attention_interval": 2, "mlp_only_layers": [1]},
    ),
    "hybrid qwen3 next with biases, gates not normalised": Kind(
        Qwen3NextForCausalLM,
        Qwen3NextConfig,
        DELTA
        | MOE
        | {
            "norm_topk_prob": False,
            "attention_bias": True,
            "linear_num_value_heads": 2,
            "linear_conv_kernel_dim": 3,
            "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "hybrid qwen3.5": Kind(Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | {"rope_parameters": MROPE}),
    "hybrid qwen3.5 tied": Kind(
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        DELTA | {"tie_word_embeddings": True, "linear_num_value_heads": 2, "attention_bias": True},
    ),
    "hybrid qwen3.5 moe": Kind(Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, DELTA | MOE | {"rope_parameters": MROPE}),
    "hybrid nemotron h": Kind(
        NemotronHForCausalLM,
        NemotronHConfig,
        NEMOTRON
        | {
            "hybrid_override_pattern": "M-*-",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "hybrid nemotron 3": Kind(
        NemotronHForCausalLM,
        NemotronHConfig,
        NEMOTRON | ROUTED | {"layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"]},
    ),
    "hybrid nemotron 3 latent, in groups": Kind(
        NemotronHForCausalLM,
        NemotronHConfig,
        NEMOTRON
        | ROUTED
        | {
            "layers_block_type": ["moe", "mamba", "attention"],
            "moe_latent_size": 16,
            "mlp_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "norm_topk_prob": False,
        },
    ),
    "lfm2": Kind(Lfm2ForCausalLM, Lfm2Config, LFM2 | {"block_multiple_of": 8, "norm_eps": 1e-4}),
    "lfm2 untied with biases, longer convolution": Kind(
        Lfm2ForCausalLM,
        Lfm2Config,
        LFM2
        | {
            "layer_types": None,
            "full_attn_idxs": [2],
            "conv_bias": True,
            "conv_L_cache": 5,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2 moe": Kind(Lfm2MoeForCausalLM, Lfm2MoeConfig, LFM2_MOE | {"routed_scaling_factor": 2.5}),
    "lfm2 moe with biases, not balanced, not normalised": Kind(
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig,
        LFM2_MOE | {"conv_bias": True, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "hybrid kimi linear": Kind(KimiLinearForCausalLM, KimiLinearConfig, KIMI),
    "hybrid kimi linear query latent, in groups": Kind(
        KimiLinearForCausalLM,
        KimiLinearConfig,
        KIMI
        | {
            "q_lora_rank": 14,
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "linear_conv_kernel_dim": 3,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
    ),
    "hybrid glm 5.3 flash": Kind(Glm5NextForConditionalGeneration, glm5_next_config, GLM5_NEXT),
    "hybrid glm 5.3 flash shared choices, unbounded decay": Kind(
        Glm5NextForConditionalGeneration,
        glm5_next_config,
        GLM5_NEXT
        | {
            "layer_types": ["deepseek_sparse_attention"] * 3 + ["linear_attention"],
            "indexer_types": ["full", "shared", "full", "full"],
            "attention_bias": True,
            "linear_lower_bound": None,
            "index_kpool": 3,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
}
