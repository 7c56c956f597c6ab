"""Small configs of the families whose layers are not all Megatron's: recurrent mixers, gated and sparse attention."""

from typing import Any

from transformers import (
    DeepseekV32Config,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mistral4Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
DELTA = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
EXPERTS = {
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 2,
}
# Samples have 5 to 12 tokens, of which an indexer selects four.
INDEXER = {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 10}
KIMI = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "linear_head_dim": 6,
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
NEMOTRON = {
    "num_hidden_layers": None,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 6,
    "n_groups": 2,
    "ssm_state_size": 5,
    "chunk_size": 32,
    "time_step_min": 1e-12,
    "eos_token_id": None,
}
ROUTED_NEMOTRON = {
    "moe_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "moe"],
}
LFM2 = {"pad_token_id": None, "layer_types": ["conv", "full_attention", "conv", "conv"]}
LFM2_MOE = {
    "num_dense_layers": 1,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
}


def _write(config: PretrainedConfig, name: str) -> dict[str, Any]:
    return config.to_dict() | {"architectures": [name]}


KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": _write(Qwen3NextConfig(**(SIZES | DELTA | EXPERTS)), "Qwen3NextForCausalLM"),
    "qwen3_5": _write(
        Qwen3_5TextConfig(**(SIZES | DELTA | {"tie_word_embeddings": True})),
        "Qwen3_5ForCausalLM",
    ),
    "qwen3_5_moe": _write(Qwen3_5MoeTextConfig(**(SIZES | DELTA | EXPERTS)), "Qwen3_5MoeForCausalLM"),
    "deepseek_v32": _write(
        DeepseekV32Config(**(SIZES | LATENT | INDEXER | {"n_group": 4, "topk_group": 2})), "DeepseekV32ForCausalLM"
    ),
    "glm_moe_dsa": _write(
        GlmMoeDsaConfig(**(SIZES | LATENT | INDEXER | {"n_group": 1, "topk_group": 1})), "GlmMoeDsaForCausalLM"
    ),
    "glm_moe_dsa shared": _write(
        GlmMoeDsaConfig(
            **(SIZES | LATENT | INDEXER | {"n_group": 1, "topk_group": 1}),
            indexer_types=["full", "full", "shared", "full"],
        ),
        "GlmMoeDsaForCausalLM",
    ),
    "glm4_moe_lite": _write(
        Glm4MoeLiteConfig(**(SIZES | LATENT | {"n_group": 1, "topk_group": 1})), "Glm4MoeLiteForCausalLM"
    ),
    "mistral4": _write(Mistral4Config(**(SIZES | LATENT | {"n_group": 1, "topk_group": 1})), "Mistral4ForCausalLM"),
    "kimi_linear": _write(KimiLinearConfig(**(SIZES | KIMI)), "KimiLinearForCausalLM"),
    "nemotron_h": _write(
        NemotronHConfig(**(SIZES | NEMOTRON | {"hybrid_override_pattern": "M-*-M-"})), "NemotronHForCausalLM"
    ),
    "nemotron_3": _write(NemotronHConfig(**(SIZES | NEMOTRON | ROUTED_NEMOTRON)), "NemotronHForCausalLM"),
    "nemotron_3_super": _write(
        NemotronHConfig(**(SIZES | NEMOTRON | ROUTED_NEMOTRON | {"moe_latent_size": 12})), "NemotronHForCausalLM"
    ),
    "lfm2": _write(
        Lfm2Config(**(SIZES | LFM2 | {"conv_bias": True, "block_auto_adjust_ff_dim": False})), "Lfm2ForCausalLM"
    ),
    "lfm2_moe": _write(Lfm2MoeConfig(**(SIZES | LFM2 | LFM2_MOE)), "Lfm2MoeForCausalLM"),
}
ROUTED = {
    "qwen3_next": (3, 4, 2),
    "deepseek_v32": (2, 8, 4),
    "glm_moe_dsa": (2, 8, 4),
    "glm_moe_dsa shared": (2, 8, 4),
    "qwen3_5_moe": (4, 4, 2),
    "glm4_moe_lite": (3, 8, 4),
    "mistral4": (2, 8, 4),
    "kimi_linear": (3, 4, 2),
    "nemotron_3": (3, 4, 2),
    "nemotron_3_super": (3, 4, 2),
    "lfm2_moe": (3, 4, 2),
}
"""Layers with experts, experts, and experts a token."""
