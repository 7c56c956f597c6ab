"""What the families with experts read from configs as they are published, and what they refuse."""

from dataclasses import replace

import pytest
import torch
from tests.models.oracle import hf_logits, our_logits, relative, tokens_of, twin
from tests.models.small_families.moe import KINDS, LLAMA4, LLAMA4_ROPE, STEP_TOWER
from tests.models.small_families.small import SMALL
from transformers import Llama4Config, Llama4ForConditionalGeneration, Step3p7Config

from miles.core.errors import UsageError
from miles.models.checkpoint import hf, param_map
from miles.models.families import spec_from_config

VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vision_output_dim": 16,
    "image_size": 28,
    "patch_size": 14,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}


def config_like(kind, **changes):
    """The config a kind of model would be saved with."""
    wanted = KINDS[kind]
    config = wanted.config(**(SMALL | wanted.own)).to_dict()
    return config | {"architectures": [wanted.model.__name__]} | changes


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_minimax_may_name_the_channels_that_turn_as_its_published_configs_do():
    config = without(config_like("minimax-m2"), "partial_rotary_factor", "rope_parameters")
    spec = spec_from_config(config | {"rope_theta": 5e6, "rotary_dim": 8})
    assert spec == spec_from_config(config_like("minimax-m2"))
    assert spec.layers[0].mixer.rope.dim == 8


def test_minimax_refuses_two_answers_to_how_much_turns():
    with pytest.raises(UsageError, match=r"rotary_dim of config.json is 4, but partial_rotary_factor says 8"):
        spec_from_config(config_like("minimax-m2", rotary_dim=4))


def test_gpt_oss_without_rope_settings_is_stretched_as_it_was_trained():
    bare = without(config_like("gpt-oss"), "rope_parameters", "rope_scaling", "layer_types")
    said = config_like("gpt-oss without attention biases", attention_bias=True)
    read = spec_from_config(bare)
    assert read.layers[0].mixer.rope == spec_from_config(said).layers[0].mixer.rope
    assert read.layers[0].mixer.rope.kind == "yarn"
    assert [layer.mixer.window for layer in read.layers] == [16, None]


def test_llama_4_takes_an_empty_list_and_a_count_for_what_older_configs_meant_by_them():
    plain = config_like("llama 4")
    older = without(plain, "layer_types", "moe_layers") | {"no_rope_layers": [], "attn_temperature_tuning": 4}
    assert spec_from_config(older) == spec_from_config(plain)
    assert [layer.mixer.rope is None for layer in spec_from_config(older).layers] == [False, False, False, True]


def test_layers_that_guess_further_ahead_are_left_alone_and_others_are_not():
    spec = spec_from_config(config_like("glm-4.5"))
    assert param_map.is_ignorable(spec, "model.layers.3.mlp.experts.0.up_proj.weight")
    assert not param_map.is_ignorable(spec, "model.layers.2.mlp.experts.9.up_proj.weight")


def test_ernie_leaves_its_own_layer_that_guesses_ahead_alone():
    spec = spec_from_config(config_like("ernie 4.5 moe"))
    assert param_map.is_ignorable(spec, "model.mtp_block.0.self_attn.q_proj.weight")
    assert not param_map.is_ignorable(spec, "model.layers.3.self_attn.q_proj.weight")


def publish_step(text):
    """The text config of a Step model as StepFun publishes it: other names, lists with a layer that guesses ahead."""
    ropes = [text["rope_parameters"][kind] for kind in (*text["layer_types"], "full_attention")]
    full = text["rope_parameters"]["full_attention"]
    gone = ("num_key_value_heads", "n_routed_experts", "num_experts_per_tok", "num_sliding_attention_heads")
    return without(text, *gone, "rope_parameters", "mlp_layer_types", "query_pre_attn_scalar", "per_layer_config") | {
        "num_nextn_predict_layers": 1,
        "num_attention_groups": text["num_key_value_heads"],
        "moe_num_experts": text["n_routed_experts"],
        "moe_top_k": text["num_experts_per_tok"],
        "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16},
        "layer_types": [*text["layer_types"], "full_attention"],
        "moe_layers_enum": "1,2,3",
        "swiglu_limits": [*text["swiglu_limits"], 0.0],
        "swiglu_limits_shared": [*text["swiglu_limits_shared"], 0.0],
        "rope_theta": [rope["rope_theta"] for rope in ropes],
        "partial_rotary_factors": [rope.get("partial_rotary_factor", 1.0) for rope in ropes],
        "rope_scaling": without(full, "rope_theta", "partial_rotary_factor"),
        "yarn_only_types": ["full_attention"],
        "use_rope_layers": [],
        "use_head_wise_attn_gate": True,
        "zero_centered": True,
    }


def test_step_reads_its_published_configs_as_transformers_does():
    config = config_like("step 3.7")
    published = publish_step(config["text_config"])
    outer = {"architectures": config["architectures"], "text_config": published}
    ours = spec_from_config(outer)
    theirs = Step3p7Config(text_config=dict(published), vision_config=dict(STEP_TOWER)).to_dict()
    # transformers writes the default of the scale, which it leaves to the size of a head.
    layers = [replace(x, mixer=replace(x.mixer, scale=16**-0.5)) for x in ours.layers]
    assert replace(ours, layers=tuple(layers)) == spec_from_config(theirs | {"architectures": config["architectures"]})
    assert replace(ours, layers=tuple(layers)) == spec_from_config(config)
    alone = spec_from_config(published | {"architectures": ["Step3p5ForCausalLM"]})
    assert replace(alone, family="step3p7") == ours
    assert [layer.mixer.num_heads for layer in ours.layers] == [4, 6, 6, 4]
    assert [layer.mixer.rope.dim for layer in ours.layers] == [8, None, None, 8]


def test_step_leaves_its_tower_and_the_layers_that_guess_ahead_alone():
    spec = spec_from_config(config_like("step 3.7"))
    assert param_map.is_ignorable(spec, "model.layers.4.self_attn.q_proj.weight")
    assert param_map.is_ignorable(spec, "vision_model.conv1.weight")
    assert not param_map.is_ignorable(spec, "model.layers.3.share_expert.bias")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("swiglu_limits", [1.0, 2.0]),
        ("swiglu_limits_shared", [-1.0] * 4),
        ("moe_router_activation", "softmax"),
        ("use_rope_layers", [True, False]),
        ("use_head_wise_attn_gate", False),
        ("zero_centered", False),
        ("num_sliding_attention_heads", 5),
        ("attention_other_setting", {"head_dim": 8}),
        ("moe_layers_enum", "1,two"),
    ],
)
def test_what_step_does_not_do_is_refused_by_the_name_of_its_key(key, value):
    config = config_like("step 3.7")
    text = without(config["text_config"], "mlp_layer_types") | {key: value}
    with pytest.raises(UsageError, match=rf"^{key}(\.head_dim)? of config\.json "):
        spec_from_config(config | {"text_config": text})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}),
        ("mixtral", {"hidden_act": "gelu"}),
        ("mixtral", {"num_experts_per_tok": 9}),
        ("qwen2 moe", {"hidden_act": "relu"}),
        ("glm-4.5 in groups", {"n_group": 3}),
        ("glm-4.5 in groups", {"topk_group": 5}),
        ("minimax-m2", {"scoring_func": "softmax"}),
        ("minimax-m2", {"use_qk_norm": False}),
        ("minimax-m2", {"shared_intermediate_size": 12}),
        ("minimax-m2", {"attn_type_list": [1, 0]}),
        ("ernie 4.5 moe", {"use_bias": True}),
        ("ernie 4.5 moe", {"moe_k": 9}),
        ("ernie 4.5 moe", {"moe_layer_end_index": -2}),
        ("hunyuan moe", {"moe_topk": [2, 3]}),
        ("hunyuan moe", {"moe_intermediate_size": [20, 20]}),
        ("hunyuan moe", {"num_shared_expert": [2, 2]}),
        ("hunyuan moe", {"use_cla": True}),
        ("hunyuan moe", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}}),
        ("gpt-oss", {"swiglu_limit": 5.0}),
        ("gpt-oss", {"layer_types": ["full_attention", "chunked_attention"]}),
        ("llama 4", {"no_rope_layers": [1, 0]}),
        ("llama 4", {"attention_chunk_size": None}),
    ],
)
def test_what_is_not_done_is_refused_by_the_name_of_its_key(kind, changes):
    with pytest.raises(UsageError, match=rf"^{next(iter(changes))} of config\.json "):
        spec_from_config(config_like(kind, **changes))


@pytest.fixture(scope="module")
def seeing():
    """A small Llama 4 that also sees, as the published ones do."""
    torch.manual_seed(0)
    text = SMALL | LLAMA4 | {"rope_parameters": dict(LLAMA4_ROPE)}
    config = Llama4Config(text_config=text, vision_config=VISION, attn_implementation="eager")
    return Llama4ForConditionalGeneration(config).eval()


def test_the_text_model_inside_a_llama_4_that_sees_is_read_and_says_the_same(seeing, tmp_path):
    seeing.save_pretrained(tmp_path)
    decoder = hf.load(tmp_path, device="cpu", dtype=torch.float32)
    assert decoder.spec.family == "llama4"
    same = twin(seeing)
    assert all(torch.equal(a, b) for a, b in zip(decoder.parameters(), same.parameters(), strict=True))
    sequences = tokens_of((7, 40, 90))
    with torch.no_grad():
        assert relative(our_logits(decoder, sequences), hf_logits(seeing, sequences)) <= 1e-5


def test_a_llama_4_without_its_text_config_is_refused():
    with pytest.raises(UsageError, match=r"text_config of config\.json is missing"):
        spec_from_config({"architectures": ["Llama4ForConditionalGeneration"]})
