"""Configs read into specs and written back."""

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from miles.core.errors import UsageError
from miles.models.families import config_of, spec_of
from miles.models.spec import DecoderSpec, MoeSpec, RopeSpec

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


def test_the_old_and_the_new_way_of_writing_rope_read_alike():
    old = spec_of(LLAMA | {"rope_theta": 500000.0, "rope_scaling": STRETCH})
    new = spec_of(LLAMA | {"rope_parameters": STRETCH | {"rope_theta": 500000.0}})
    assert old == new
    assert old.rope == RopeSpec(theta=500000.0, kind="llama3", factor=8.0)
    assert spec_of(LLAMA | {"rope_theta": 500000.0, "rope_scaling": None}).rope == RopeSpec(theta=500000.0)


def test_what_a_config_leaves_out_is_what_transformers_takes():
    spec = spec_of({k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "rms_norm_eps")})
    assert (spec.num_kv_heads, spec.head_dim, spec.norm_eps, spec.rope.theta) == (32, 128, 1e-6, 10000.0)
    assert not (spec.tie_embeddings or spec.qkv_bias or spec.mlp_bias or spec.qk_norm)


def test_end_tokens_may_be_none_one_or_several():
    assert spec_of(LLAMA).eos_token_ids == (128001, 128008, 128009)
    assert spec_of(LLAMA | {"eos_token_id": 2}).eos_token_ids == (2,)
    assert spec_of(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_a_config_without_architectures_is_known_by_its_model_type():
    assert spec_of({k: v for k, v in LLAMA.items() if k != "architectures"}) == spec_of(LLAMA)


def test_experts_are_counted_under_either_name_and_placed_as_the_config_says():
    named = {k: v for k, v in MOE.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert spec_of(named) == spec_of(MOE)
    some = spec_of(MOE | {"num_hidden_layers": 7, "decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert some.moe_layers == (1, 5)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        (LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        (LLAMA | {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA | {"head_dim": 3}, "head_dim"),
        (LLAMA | {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        (LLAMA | {"rms_norm_eps": "tiny"}, "rms_norm_eps"),
        ({k: v for k, v in LLAMA.items() if k != "vocab_size"}, "vocab_size"),
        (QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 20}, "use_sliding_window"),
        (QWEN | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (MOE | {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window"),
        (MOE | {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, "LlamaForCausalLM, Qwen2ForCausalLM"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_by_the_name_of_its_key(config, key):
    with pytest.raises(UsageError) as caught:
        spec_of(config)
    assert len(caught.value.problems) == 1
    assert key in caught.value.problems[0]


def test_a_window_that_no_layer_uses_is_accepted():
    spec_of(QWEN | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 32})
    spec_of(QWEN | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 0})


def test_all_complaints_come_at_once():
    with pytest.raises(UsageError) as caught:
        spec_of(LLAMA | {"hidden_act": "gelu", "vocab_size": 0})
    assert len(caught.value.problems) == 2


sizes = st.integers(1, 8)
ropes = st.one_of(
    st.builds(RopeSpec, theta=st.floats(100.0, 1e6)),
    st.builds(RopeSpec, theta=st.just(1e4), kind=st.just("linear"), factor=st.floats(1.0, 8.0)),
    st.builds(
        RopeSpec,
        theta=st.just(5e5),
        kind=st.just("llama3"),
        factor=st.floats(2.0, 32.0),
        original_max_positions=st.integers(16, 99),
    ),
)


@st.composite
def specs(draw):
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "qwen3_moe"]))
    kv_heads, layers, bias = draw(sizes), draw(sizes), draw(st.booleans())
    moe = None
    if family == "qwen3_moe":
        count = draw(sizes)
        moe = MoeSpec(
            num_experts=count,
            experts_per_token=draw(st.integers(1, count)),
            intermediate_size=draw(sizes),
            norm_topk_prob=draw(st.booleans()),
            layers=tuple(sorted(draw(st.sets(st.integers(0, layers - 1))))),
        )
    heads = kv_heads * draw(st.integers(1, 3))
    return DecoderSpec(
        family=family,
        vocab_size=draw(sizes),
        hidden_size=heads * draw(sizes),
        intermediate_size=draw(sizes),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=2 * draw(sizes),
        norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rope=draw(ropes),
        qk_norm=family.startswith("qwen3"),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and draw(st.booleans()),
        tie_embeddings=draw(st.booleans()),
        max_positions=draw(st.integers(100, 1000)),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, 9), max_size=3))),
        moe=moe,
    )


@given(specs())
def test_a_spec_survives_being_written_and_read(spec):
    assert spec_of(config_of(spec)) == spec


@given(specs())
def test_transformers_understands_a_written_spec_as_we_do(spec):
    told = config_of(spec)
    theirs = AutoConfig.for_model(**told).to_dict() | {"architectures": told["architectures"]}
    assert spec_of(theirs) == spec


def test_a_spec_that_cannot_be_is_refused():
    spec = spec_of(LLAMA)
    with pytest.raises(ValueError, match="share"):
        replace(spec, num_kv_heads=5)
    with pytest.raises(ValueError, match="even"):
        replace(spec, head_dim=7)


def test_reading_configs_needs_neither_torch_nor_transformers_nor_numpy():
    program = (
        "import sys, miles.models.families, miles.models.footprint, miles.models.names, miles.models.config\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
