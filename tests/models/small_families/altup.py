"""Gemma 3n: several residual streams, a learned residual, per-layer inputs, shared keys, sparse activations."""

from tests.models.small_families.small import Kind
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig

SLIDING, FULL = "sliding_attention", "full_attention"
# Sizes all different, so that none can stand in for another.
GEMMA3N = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "intermediate_size": [40, 40, 24, 24],
    "sliding_window": 8,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 53,
    "laurel_rank": 5,
    "altup_num_inputs": 3,
    "activation_sparsity_pattern": [0.7, 0.0, 0.3, 0.0],
    "final_logit_softcapping": 4.0,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}

KINDS = {
    "gemma3n": Kind(Gemma3nForCausalLM, Gemma3nTextConfig, GEMMA3N),
    "gemma3n untied, another stream active": Kind(
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        GEMMA3N
        | {
            "tie_word_embeddings": False,
            "altup_active_idx": 1,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "num_hidden_layers": 2,
            "intermediate_size": 40,
            "layer_types": [SLIDING, FULL],
            "activation_sparsity_pattern": [0.0, 0.5],
            "attention_bias": True,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
}
