"""Published configs of MLA models read into specs: sizes, scales, unused tensors and rejected options."""

import math

import pytest

from miles.core.errors import UsageError
from miles.kernels.numerics import FAST
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import active_parameter_count, kv_bytes_per_token, parameter_count
from miles.models.checkpoint import param_map
from miles.models.families import spec_from_config
from miles.models.spec import MlaSpec, MlpSpec, MoeSpec

YARN = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
MISTRAL4 = dict(load_known_models()["Mistral-Small-4-119B-2603"])
V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V32 = V3 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
}
KIMI = V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "rope_scaling": YARN | {"beta_fast": 1.0, "factor": 32.0},
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "topk_group": 1,
    "vocab_size": 163840,
}
V2 = V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "rope_scaling": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 16.0,
    "scoring_func": "softmax",
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "vocab_size": 102400,
}
V2_LITE = V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "topk_method": "greedy",
}
FLASH = {
    **{key: value for key, value in V3.items() if key not in ("scoring_func", "moe_layer_freq")},
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "max_position_embeddings": 202752,
    "moe_intermediate_size": 1536,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 20,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 47,
    "num_key_value_heads": 20,
    "partial_rotary_factor": 1.0,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.8,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
GLM5 = V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_nope_head_dim": 192,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "rope_scaling": None,
    "topk_group": 1,
    "v_head_dim": 256,
    "vocab_size": 154880,
}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (V3, 671e9, 37e9),
        (KIMI, 1026e9, 32e9),
        (V2, 236e9, 21e9),
        (V2_LITE, 15.7e9, None),
        (FLASH, 30e9, None),
        (GLM5, 744e9, 40e9),
    ],
    ids=["DeepSeek-V3", "Kimi-K2", "DeepSeek-V2", "DeepSeek-V2-Lite", "GLM-4.7-Flash", "GLM-5"],
)
def test_published_models_have_as_many_parameters_as_their_makers_say(config, total, active):
    spec = spec_from_config(config)
    assert math.isclose(parameter_count(spec), total, rel_tol=0.005)
    assert active is None or math.isclose(active_parameter_count(spec), active, rel_tol=0.05)


def test_an_engine_remembers_a_latent_and_a_position_and_what_the_scorer_needs():
    assert kv_bytes_per_token(spec_from_config(V3), "bfloat16", FAST) == 61 * (512 + 64) * 2
    assert kv_bytes_per_token(spec_from_config(V32), "bfloat16", FAST) == 61 * (512 + 64 + 128) * 2
    shared = spec_from_config(GLM5 | {"index_topk_freq": 4, "index_skip_topk_offset": 3, "indexer_types": None})
    full = sum(layer.mixer.indexer.source is None for layer in shared.layers)
    assert full == 3 + 75 // 4
    assert kv_bytes_per_token(shared, "bfloat16", FAST) == (78 * (512 + 64) + full * 128) * 2


def test_the_first_layers_are_dense_and_the_others_route_as_the_config_says():
    spec = spec_from_config(V3)
    assert spec.moe_layers == tuple(range(3, 61))
    assert spec.layers[0].ffn == MlpSpec(size=18432)
    assert spec.moe == MoeSpec(
        num_experts=256,
        experts_per_token=8,
        size=2048,
        norm_topk_prob=True,
        score="sigmoid",
        correction=True,
        groups=8,
        kept_groups=4,
        group_top=2,
        scale=2.5,
        shared=MlpSpec(size=2048),
    )
    older = spec_from_config(V2).moe
    assert older is not None and not older.correction
    assert (older.score, older.groups, older.kept_groups, older.group_top, older.scale) == ("softmax", 8, 3, 1, 16.0)
    assert spec_from_config(V2_LITE | {"first_k_dense_replace": 0}).moe_layers == tuple(range(27))
    mixed = ["sparse", "dense"] + 45 * ["sparse"]
    assert spec_from_config(FLASH | {"mlp_layer_types": mixed}).moe_layers == (0, *range(2, 47))


def test_a_stretched_context_sharpens_the_scores():
    def scale(config) -> float:
        mixer = spec_from_config(config).layers[0].mixer
        assert isinstance(mixer, MlaSpec)
        return mixer.scale

    assert scale(V3 | {"rope_scaling": None}) == 192**-0.5
    assert math.isclose(scale(V3), 192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert math.isclose(scale(V2), 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert scale(V3 | {"rope_scaling": YARN | {"mscale_all_dim": 0}}) == 192**-0.5
    assert scale(V3 | {"rope_scaling": YARN | {"factor": 1.0}}) == 192**-0.5


def test_kimi_is_known_by_its_architecture_and_by_its_own_name():
    named = {key: value for key, value in KIMI.items() if key != "architectures"}
    assert spec_from_config(KIMI).layers == spec_from_config(named).layers
    assert set(param_map.build_param_map(spec_from_config(KIMI))) == set(
        param_map.build_param_map(spec_from_config(named))
    )


def test_only_layers_that_guess_ahead_and_scorers_nobody_asks_are_spare():
    deep = spec_from_config(V3)
    assert param_map.is_ignorable(deep, "model.layers.61.eh_proj.weight")
    assert param_map.is_ignorable(deep, "model.layers.61.mlp.experts.7.up_proj.weight")
    assert not param_map.is_ignorable(deep, "model.layers.60.eh_proj.weight")
    assert not param_map.is_ignorable(deep, "model.layers.6.self_attn.indexer.wk.weight")
    assert not param_map.is_ignorable(deep, "model.layers_61.weight")
    glm = spec_from_config(GLM5 | {"num_hidden_layers": 4, "index_topk_pattern": "FSSF"})
    assert param_map.is_ignorable(glm, "model.layers.4.self_attn.indexer.wk.weight")
    assert param_map.is_ignorable(glm, "model.layers.2.self_attn.indexer.wk.weight")
    assert not param_map.is_ignorable(glm, "model.layers.3.self_attn.indexer.wk_b.weight")


@pytest.mark.parametrize(
    ("config", "change", "key"),
    [
        (V3, {"q_lora_rank": ...}, "q_lora_rank"),
        (V3, {"num_key_value_heads": 8}, "num_key_value_heads"),
        (V3, {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
        (V3, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (V3, {"hidden_act": "gelu"}, "hidden_act"),
        (V3, {"scoring_func": "softmax"}, "scoring_func"),
        (V3, {"topk_method": "greedy"}, "topk_method"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V3, {"n_group": 7}, "n_group"),
        (V3, {"n_group": 256}, "n_group"),
        (V3, {"topk_group": 9}, "topk_group"),
        (V3, {"n_group": 128, "topk_group": 2}, "topk_group"),
        (V3, {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (V3, {"num_experts_per_tok": 300}, "num_experts_per_tok"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method"),
        (V32, {"q_lora_rank": None}, "q_lora_rank"),
        (V32, {"index_head_dim": 32}, "index_head_dim"),
        (V32, {"index_topk": 0}, "index_topk"),
        (V32, {"indexer_rope_interleave": True}, "indexer_rope_interleave"),
        (V32, {"layer_types": 61 * ["full_attention"]}, "layer_types"),
        (FLASH, {"first_k_dense_replace": 2}, "first_k_dense_replace"),
        (FLASH, {"mlp_layer_types": 3 * ["dense"]}, "mlp_layer_types"),
        (FLASH, {"mlp_layer_types": 47 * ["thin"]}, "mlp_layer_types"),
        (GLM5, {"indexer_types": 3 * ["full"]}, "indexer_types"),
        (GLM5, {"indexer_types": 78 * ["shared"]}, "indexer_types"),
        (GLM5, {"index_topk_pattern": 78 * "X"}, "indexer_types"),
        (GLM5, {"indexer_rope_interleave": False}, "indexer_rope_interleave"),
        (MISTRAL4, {"rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        (MISTRAL4, {"rope_parameters": YARN}, "rope_parameters"),
        (
            MISTRAL4,
            {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.3}},
            "rope_parameters",
        ),
        (MISTRAL4, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
    ],
)
def test_what_is_not_implemented_is_refused_once_by_its_key(config, change, key):
    changed = {k: v for k, v in (config | change).items() if v is not ...}
    with pytest.raises(UsageError) as caught:
        spec_from_config(changed)
    assert str(caught.value).count(f"{key} of config.json") == 1
