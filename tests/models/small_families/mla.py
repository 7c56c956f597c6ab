"""DeepSeek-V2, V3, V3.2, Kimi-K2, GLM-4.7-Flash, GLM-5, Mistral 4: latent attention, with or without chosen tokens."""

from typing import Any

from tests.models.small_families.small import Kind
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
    Mistral4Config,
    Mistral4ForCausalLM,
)

# Sizes all different, so that none can stand in for another.
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "experts_implementation": "eager",
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
GROUPS = {"n_group": 4, "topk_group": 2}
ONE_GROUP = {"n_group": 1, "topk_group": 1}
# Eight channels turn: some by their own frequency, some by a stretched one, some by something between.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.2,
    "original_max_position_embeddings": 64,
}
# With so many heads no token is left without a score, and no choice is a matter of taste.
SPARSE = LATENT | {"index_topk": 9, "index_head_dim": 10, "index_n_heads": 16}


def _stretched(**changes) -> dict[str, Any]:
    return {"qk_rope_head_dim": 8, "rope_parameters": YARN | changes}


def _v2(**own) -> Kind:
    return Kind(DeepseekV2ForCausalLM, DeepseekV2Config, LATENT | own)


def _v3(**own) -> Kind:
    return Kind(DeepseekV3ForCausalLM, DeepseekV3Config, LATENT | GROUPS | own)


def _v32(**own) -> Kind:
    return Kind(DeepseekV32ForCausalLM, DeepseekV32Config, SPARSE | GROUPS | own)


def _glm5(**own) -> Kind:
    return Kind(GlmMoeDsaForCausalLM, GlmMoeDsaConfig, SPARSE | own)


def _mistral4(**own) -> Kind:
    changes = {"llama_4_scaling_beta": 0.4, "original_max_position_embeddings": 16}
    return Kind(Mistral4ForCausalLM, Mistral4Config, LATENT | {"pad_token_id": None} | _stretched(**changes) | own)


KINDS = {
    "deepseek v2 in groups": _v2(topk_method="group_limited_greedy", **GROUPS),
    "deepseek v2 lite": _v2(q_lora_rank=None, **_stretched(mscale=0.707, mscale_all_dim=0.707)),
    "deepseek v2 with biases": _v2(attention_bias=True, mlp_bias=True, first_k_dense_replace=0, **ONE_GROUP),
    "deepseek v3": _v3(**_stretched()),
    "deepseek v3 direct queries, halves": _v3(q_lora_rank=None, rope_interleave=False, norm_topk_prob=False),
    "deepseek v3 tied with biases": _v3(attention_bias=True, tie_word_embeddings=True),
    "kimi k2": _v3(**ONE_GROUP, **_stretched(beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0), n_shared_experts=1),
    "deepseek v3.2": _v32(**_stretched()),
    "deepseek v3.2 with biases": _v32(attention_bias=True, index_topk=16, first_k_dense_replace=0),
    "glm 4.7 flash": Kind(
        Glm4MoeLiteForCausalLM,
        Glm4MoeLiteConfig,
        LATENT | ONE_GROUP | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "glm 4.7 flash experts first": Kind(
        Glm4MoeLiteForCausalLM, Glm4MoeLiteConfig, LATENT | GROUPS | {"mlp_layer_types": ["sparse", "dense"]}
    ),
    "glm 5": _glm5(),
    "glm 5 shared choices": _glm5(num_hidden_layers=4, indexer_types=["full", "shared", "shared", "full"]),
    "glm 5 a choice every other layer": _glm5(num_hidden_layers=4, index_topk_freq=2, first_k_dense_replace=3),
    "mistral 4": _mistral4(**GROUPS),
    "mistral 4 tied with biases, direct queries, halves": _mistral4(
        **ONE_GROUP,
        q_lora_rank=None,
        rope_interleave=False,
        norm_topk_prob=False,
        attention_bias=True,
        tie_word_embeddings=True,
        first_k_dense_replace=0,
    ),
}
