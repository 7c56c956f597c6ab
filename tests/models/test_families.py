"""Configs read into specs and written back."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoConfig,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    GlmConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from miles.core.errors import UsageError
from miles.models.families import config_from_spec, spec_from_config
from miles.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, RopeSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "eos_token_id": [128001, 128008, 128009],
}
STRETCH = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
QWEN = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
MOE = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def attention(spec, layer=0):
    """The attention of a layer."""
    mixer = spec.layers[layer].mixer
    assert isinstance(mixer, AttentionSpec)
    return mixer


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_the_old_and_the_new_way_of_writing_rope_read_alike():
    old = spec_from_config(LLAMA | {"rope_theta": 500000.0, "rope_scaling": STRETCH})
    new = spec_from_config(LLAMA | {"rope_parameters": STRETCH | {"rope_theta": 500000.0}})
    assert old == new
    assert attention(old).rope == RopeSpec(theta=500000.0, kind="llama3", factor=8.0)
    plain = spec_from_config(LLAMA | {"rope_theta": 500000.0, "rope_scaling": None})
    assert attention(plain).rope == RopeSpec(theta=500000.0)


def test_the_original_length_may_stand_beside_the_rotary_parameters():
    inside = spec_from_config(
        LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}}
    )
    beside = LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4}, "original_max_position_embeddings": 32768}
    assert spec_from_config(beside) == inside
    nowhere = spec_from_config(LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4}})
    assert attention(nowhere).rope.original_max_positions == 131072


def test_gemma3_reads_its_two_rotations_from_older_and_newer_configs():
    sizes = without(LLAMA, "hidden_act") | {"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 6}
    scaling = {"factor": 8.0, "rope_type": "linear"}
    old = sizes | {"rope_theta": 1000000, "rope_local_base_freq": 10000, "rope_scaling": scaling}
    local = {"rope_type": "default", "rope_theta": 10000.0}
    new = sizes | {"rope_parameters": {"full_attention": scaling | {"rope_theta": 1e6}, "sliding_attention": local}}
    spec = spec_from_config(old)
    assert spec == spec_from_config(new)
    assert attention(spec, 0).rope == RopeSpec(theta=1e4)
    assert attention(spec, 5).rope == RopeSpec(theta=1e6, kind="linear", factor=8.0)
    assert [bool(attention(spec, i).window) for i in range(7)] == [True] * 5 + [False, True]


def test_phi3_knows_longrope_by_its_older_names():
    sizes = LLAMA | {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": 4096}
    factors = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    su, long = (spec_from_config(sizes | {"rope_scaling": factors | {"type": name}}) for name in ("su", "longrope"))
    assert su == long
    assert attention(su).rope.kind == "longrope"


SPARSE = without(LLAMA, "hidden_act", "rms_norm_eps", "eos_token_id", "num_key_value_heads", "architectures")


@pytest.mark.parametrize(
    ("config", "architecture", "given"),
    [
        (LlamaConfig, "LlamaForCausalLM", {}),
        (Qwen2Config, "Qwen2ForCausalLM", {"use_sliding_window": True}),
        (Qwen3Config, "Qwen3ForCausalLM", {"use_sliding_window": True}),
        (Qwen3MoeConfig, "Qwen3MoeForCausalLM", {"num_experts": 8, "moe_intermediate_size": 6, "head_dim": 64}),
        (Qwen3MoeConfig, "Qwen3MoeForCausalLM", {"num_local_experts": 8, "use_sliding_window": True}),
        (MistralConfig, "MistralForCausalLM", {}),
        (MinistralConfig, "MinistralForCausalLM", {}),
        (Ministral3Config, "Ministral3ForCausalLM", {"rope_parameters": None}),
        (Phi3Config, "Phi3ForCausalLM", {}),
        (Phi3Config, "Phi3ForCausalLM", {"partial_rotary_factor": 0.75, "sliding_window": 2047}),
        (SmolLM3Config, "SmolLM3ForCausalLM", {}),
        (SmolLM3Config, "SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 99}),
        (Gemma2Config, "Gemma2ForCausalLM", {}),
        (Gemma3TextConfig, "Gemma3ForCausalLM", {}),
        (Ernie4_5Config, "Ernie4_5ForCausalLM", {}),
        (Ernie4_5_MoeConfig, "Ernie4_5_MoeForCausalLM", {"moe_num_experts": 64, "moe_k": 8}),
        (HunYuanDenseV1Config, "HunYuanDenseV1ForCausalLM", {}),
        (HunYuanMoEV1Config, "HunYuanMoEV1ForCausalLM", {"num_experts": 64, "moe_intermediate_size": None}),
        (GlmConfig, "GlmForCausalLM", {}),
        (Glm4Config, "Glm4ForCausalLM", {}),
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_takes(config, architecture, given):
    reported = SPARSE | {"num_key_value_heads": 8, "moe_intermediate_size": 768, "num_experts_per_tok": 8} | given
    reported = without(reported, "model_type")
    theirs = config(**reported).to_dict()
    ours = spec_from_config(reported | {"architectures": [architecture]})
    assert replace(ours, eos_token_ids=()) == replace(
        spec_from_config(theirs | {"architectures": [architecture]}), eos_token_ids=()
    )


def test_a_text_model_beside_a_vision_tower_is_read_from_the_little_its_config_says():
    """As Gemma 3 4B was published: what is not said is a default of transformers."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106]}
    tower = {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    }
    spec = spec_from_config(config | {"text_config": text, "vision_config": tower})
    full = Gemma3Config(text_config=dict(text), vision_config=dict(tower)).to_dict() | config
    assert spec == spec_from_config(full)
    assert spec.vision is not None and (spec.vision.image_token_id, spec.vision.merge_size) == (262_144, 4)
    with pytest.raises(UsageError, match=r"mm_tokens_per_image of config\.json is 255"):
        spec_from_config(full | {"mm_tokens_per_image": 255})
    assert (spec.vocab_size, attention(spec).head_dim, attention(spec).num_heads) == (262_208, 256, 8)
    assert spec.tie_embeddings
    assert spec.eos_token_ids == (1, 106)
    assert spec_from_config(text | {"architectures": ["Gemma3ForCausalLM"]}).layers == spec.layers


def test_end_tokens_may_be_none_one_or_several():
    assert spec_from_config(LLAMA).eos_token_ids == (128001, 128008, 128009)
    assert spec_from_config(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert spec_from_config(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_a_config_without_architectures_is_known_by_its_model_type():
    assert spec_from_config(without(LLAMA, "architectures")) == spec_from_config(LLAMA)


def test_experts_are_counted_under_either_name_and_placed_as_the_config_says():
    named = without(MOE, "num_experts") | {"num_local_experts": 128}
    assert spec_from_config(named) == spec_from_config(MOE)
    some = spec_from_config(MOE | {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some.moe_layers == (1, 5)


def test_windows_are_those_the_config_puts_to_use():
    def windows(config):
        return [attention(spec_from_config(config | {"num_hidden_layers": 4}), i).window for i in range(4)]

    used = QWEN | {"use_sliding_window": True, "sliding_window": 64}
    assert windows(used | {"max_window_layers": 2}) == [None, None, 64, 64]
    assert windows(used | {"max_window_layers": 4}) == [None] * 4
    assert windows(used | {"use_sliding_window": False, "max_window_layers": 0}) == [None] * 4
    assert windows(used | {"layer_types": ["full_attention", "sliding_attention"] * 2}) == [None, 64, None, 64]
    assert windows(MOE | {"use_sliding_window": True, "sliding_window": 64}) == [64] * 4
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert windows(mistral | {"sliding_window": 64}) == [64] * 4
    assert windows(mistral | {"sliding_window": None}) == [None] * 4


YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
GLM = LLAMA | {"architectures": ["GlmForCausalLM"], "model_type": "glm"}
GEMMA = without(LLAMA, "hidden_act") | {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA | {"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (LLAMA | {"rope_scaling": YARN | {"factor": "much"}}, "factor"),
        (LLAMA | {"rope_scaling": YARN | {"factor": 0}}, "factor"),
        (LLAMA | {"rope_scaling": YARN | {"beta_fast": True}}, "beta_fast"),
        (LLAMA | {"rope_scaling": YARN | {"truncate": 1}}, "truncate"),
        (
            LLAMA | {"rope_scaling": YARN | {"original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 64}}, "short_factor"),
        (LLAMA | {"rope_scaling": LONG | {"short_factor": [1.0] * 32}}, "short_factor"),
        (LLAMA | {"rope_scaling": LONG | {"long_factor": ["a"] * 64}}, "long_factor"),
        (LLAMA | {"rope_scaling": "yarn"}, "rope_scaling"),
        (LLAMA | {"rope_parameters": {"rope_theta": "big"}}, "rope_theta"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (GLM | {"partial_rotary_factor": 0.009}, "partial_rotary_factor"),
        (GLM | {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        (GLM | {"head_dim": 6, "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (GEMMA | {"hidden_activation": "silu"}, "hidden_activation"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA | {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (GEMMA | {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        (GEMMA | {"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA | {"architectures": ["Phi3ForCausalLM"], "resid_pdrop": 0.1}, "resid_pdrop"),
        (LLAMA | {"architectures": ["Phi3ForCausalLM"], "rope_scaling": STRETCH}, "rope_scaling"),
        (LLAMA | {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 0]}, "no_rope_layers"),
        (LLAMA | {"architectures": ["Ministral3ForCausalLM"], "rope_parameters": YARN}, "llama_4_scaling_beta"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA | {"head_dim": 3}, "head_dim"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA | {"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        (without(LLAMA, "vocab_size"), "vocab_size"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 20}, "sliding_window"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": -1}, "max_window_layers"),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (QWEN | {"layer_types": ["chunked_attention"] * 32}, "layer_types"),
        (QWEN | {"layer_types": ["sliding_attention"] * 32}, "use_sliding_window"),
        (
            MOE | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 16},
            "layer_types",
        ),
        (MOE | {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (LLAMA | {"architectures": ["FalconForCausalLM"]}, "FalconForCausalLM"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_the_name_of_its_key(config, key):
    with pytest.raises(UsageError) as caught:
        spec_from_config(config)
    assert len(caught.value.problems) == 1
    assert key in caught.value.problems[0]


def test_all_complaints_come_at_once():
    with pytest.raises(UsageError) as caught:
        spec_from_config(LLAMA | {"hidden_act": "gelu", "vocab_size": 0})
    assert len(caught.value.problems) == 2


# -- out and back -----------------------------------------------------------------------------

sizes = st.integers(1, 8)
stretches = st.floats(1.0, 32.0)
lengths = st.integers(16, 99)


@st.composite
def ropes(draw, head_dim, longest):
    factors = st.lists(st.floats(0.5, 60.0), min_size=head_dim // 2, max_size=head_dim // 2).map(tuple)
    own = {
        "default": {},
        "linear": {"factor": stretches},
        "dynamic": {"factor": stretches, "original_max_positions": st.just(longest)},
        "llama3": {
            "factor": stretches,
            "original_max_positions": lengths,
            "low_freq_factor": st.floats(0.5, 2.0),
            "high_freq_factor": st.floats(3.0, 8.0),
        },
        "yarn": {
            "factor": stretches,
            "original_max_positions": lengths,
            "scale": st.floats(0.5, 2.0),
            "beta_fast": st.floats(8.0, 64.0),
            "beta_slow": st.floats(0.5, 4.0),
            "truncate": st.booleans(),
        },
        "longrope": {
            "factor": stretches,
            "original_max_positions": lengths,
            "scale": st.floats(0.5, 2.0),
            "short_factors": factors,
            "long_factors": factors,
        },
    }
    kind = draw(st.sampled_from(sorted(own)))
    return draw(st.builds(RopeSpec, theta=st.floats(100.0, 1e6), kind=st.just(kind), **own[kind]))


@st.composite
def experts(draw):
    count = draw(sizes)
    each = draw(st.integers(1, count))
    return MoeSpec(num_experts=count, experts_per_token=each, size=draw(sizes), norm_topk_prob=draw(st.booleans()))


@st.composite
def specs(draw):
    """What the families that are also written can be."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]))
    count, longest, bias = draw(sizes), draw(st.integers(100, 1000)), draw(st.booleans())
    kv_heads, head_dim = draw(sizes), 2 * draw(sizes)
    heads = kv_heads * draw(st.integers(1, 3))
    mixer = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope=draw(ropes(head_dim, longest)),
        qk_norm="head" if family.startswith("qwen3") else "none",
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
    )
    some, window = draw(st.lists(st.booleans(), min_size=count, max_size=count)), draw(sizes)
    if family == "qwen3_moe":
        some = [some[0]] * count
    if family == "llama":
        some = [False] * count
    mlp = MlpSpec(size=draw(sizes), bias=family == "llama" and draw(st.booleans()))
    moe, placed = draw(experts()), draw(st.sets(st.integers(0, count - 1))) if family == "qwen3_moe" else set()
    layers = tuple(
        LayerSpec(mixer=replace(mixer, window=window if has else None), ffn=moe if i in placed else mlp)
        for i, has in enumerate(some)
    )
    return DecoderSpec(
        family=family,
        vocab_size=draw(sizes),
        hidden_size=heads * draw(sizes),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        layers=layers,
        tie_embeddings=draw(st.booleans()),
        max_positions=longest,
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
    )


@given(specs())
def test_a_spec_survives_being_written_and_read(spec):
    assert spec_from_config(config_from_spec(spec)) == spec


@given(specs())
def test_transformers_understands_a_written_spec_as_we_do(spec):
    reported = config_from_spec(spec)
    theirs = AutoConfig.for_model(**reported).to_dict() | {"architectures": reported["architectures"]}
    assert spec_from_config(theirs) == spec


def test_a_spec_that_cannot_be_is_refused():
    mixer = attention(spec_from_config(LLAMA))
    with pytest.raises(ValueError, match="multiple"):
        replace(mixer, num_kv_heads=5)
    with pytest.raises(ValueError, match="even"):
        replace(mixer, head_dim=7)


def test_reading_configs_needs_neither_torch_nor_transformers_nor_numpy():
    program = (
        "import sys, miles.models.families, miles.models.accounting.params, miles.models.config\n"
        "import miles.models.checkpoint.param_map\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
