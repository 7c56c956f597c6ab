"""DeepSeek-V4: attention to a window and to compressed keys, hash routing and hyper-connections with a learned join."""

from tests.models.small_families.small import Kind
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
# Windows, selections and limits are less than what sequences reach; few indexer heads would give equal scores.
DEEPSEEK_V4 = {
    "num_key_value_heads": 1,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 14,
    "layer_types": [SLIDING, CSA, HCA, CSA],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "compress_rates": {CSA: 3, HCA: 5},
    "sliding_window": 7,
    "o_groups": 2,
    "o_lora_rank": 6,
    "index_n_heads": 16,
    "index_head_dim": 10,
    "index_topk": 3,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 0.7,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "bos_token_id": None,
    "eos_token_id": None,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}


def deepseek_v4_config(*, intermediate_size: int = 0, **own) -> DeepseekV4Config:
    """The config class calls the size of experts ``intermediate_size`` too."""
    return DeepseekV4Config(**own, experts_implementation="eager")


KINDS = {
    "deepseek v4": Kind(DeepseekV4ForCausalLM, deepseek_v4_config, DEEPSEEK_V4),
    "deepseek v4 tied, YaRN": Kind(
        DeepseekV4ForCausalLM,
        deepseek_v4_config,
        DEEPSEEK_V4
        | {
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
            "layer_types": [CSA, HCA, SLIDING, HCA],
            "mlp_layer_types": ["moe", "hash_moe", "moe", "hash_moe"],
            "compress_rates": {CSA: 2, HCA: 6},
            "index_topk": 4,
            "hc_mult": 2,
            "o_groups": 4,
        },
    ),
}
