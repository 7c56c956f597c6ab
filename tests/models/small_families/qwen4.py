"""Qwen4-Exp: Gated DeltaNet and sparse attention, gated hyper-connections and n-gram embeddings."""

from tests.models.small_families.small import Kind
from transformers import (
    Qwen4ExpConfig,
    Qwen4ExpForCausalLM,
    Qwen4ExpForConditionalGeneration,
    Qwen4ExpTextConfig,
)

LINEAR, SPARSE = "linear_attention", "qwen_sparse_attention"
# Sequences have more pools than are selected; few indexer heads would give equal scores. Prompts have tokens that end
# n-grams.
QWEN4 = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, SPARSE, LINEAR],
    "head_dim": 8,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 0],
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "output_gate_type": "sigmoid",
    "hc_count": 3,
    "hc_lowrank": 10,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 40,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 10,
    "indexer_budget": 12,
    "indexer_compress_ratio": 4,
    "eos_token_id": 7,
}
TOWER = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "patch_size": 4,
    "num_position_embeddings": 16,
}


def text_config(*, intermediate_size: int = 0, **own) -> Qwen4ExpTextConfig:
    """All layers have experts: there is no other size."""
    return Qwen4ExpTextConfig(**own, experts_implementation="eager")


def wrapped_config(*, attn_implementation: str, intermediate_size: int = 0, **text) -> Qwen4ExpConfig:
    """Qwen4-Exp of this text model and a small tower."""
    return Qwen4ExpConfig(
        text_config=text,
        vision_config=dict(TOWER),
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        attn_implementation=attn_implementation,
        experts_implementation="eager",
    )


KINDS = {
    "hybrid qwen4": Kind(Qwen4ExpForCausalLM, text_config, QWEN4),
    "hybrid qwen4 with a tower, longer n-grams, not normalised": Kind(
        Qwen4ExpForConditionalGeneration,
        wrapped_config,
        QWEN4
        | {
            "num_hidden_layers": 2,
            "layer_types": [LINEAR, "full_attention"],
            "ple_layer_ids": [1],
            "ple_embed_dim": None,
            "ngram_size": 5,
            "heads_per_ngram": 1,
            "ple_conv_kernel_size": 2,
            "hc_count": 2,
            "output_gate_type": None,
            "norm_topk_prob": False,
            "attention_bias": True,
            "indexer_compress_ratio": 3,
            "linear_num_value_heads": 2,
        },
    ),
}
