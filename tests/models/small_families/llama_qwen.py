"""Llama, Qwen2, Qwen3 and Qwen3-MoE."""

from tests.models.small_families.small import Kind
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MOE = {
    "experts_implementation": "eager",
    "head_dim": 8,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}

KINDS = {
    "qwen3": Kind(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    "qwen3 tied, every head its own": Kind(
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 8, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen3 with biases": Kind(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "attention_bias": True}),
    "qwen3 with yarn": Kind(Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "rope_parameters": YARN}),
    "qwen3 windowed in some layers": Kind(
        Qwen3ForCausalLM,
        Qwen3Config,
        {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "qwen2": Kind(Qwen2ForCausalLM, Qwen2Config, {"num_key_value_heads": 1}),
    "qwen2 tied": Kind(Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen2 windowed from a layer on": Kind(
        Qwen2ForCausalLM, Qwen2Config, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    ),
    "llama": Kind(LlamaForCausalLM, LlamaConfig, {}),
    "llama 3.1": Kind(LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama linear rope and biases": Kind(
        LlamaForCausalLM,
        LlamaConfig,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "qwen3 moe": Kind(Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE | {"norm_topk_prob": False}),
    "qwen3 moe normalised": Kind(Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE | {"norm_topk_prob": True}),
    "qwen3 moe windowed": Kind(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, MOE | {"use_sliding_window": True, "sliding_window": 12}
    ),
    "qwen3 moe in some layers": Kind(
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
}
