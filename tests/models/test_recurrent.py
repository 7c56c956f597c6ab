"""Layers whose past is a state: going on from it, the families that have them, and their configs."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.oracle import KINDS, hf_logits, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.recurrent import (
    DELTA,
    GLM5_NEXT,
    LFM2,
    LFM2_MOE,
    MOE,
    MROPE,
    NEMOTRON,
    glm5_next_config,
)
from tests.models.small_families.small import SMALL
from tests.tiers import examples
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)

from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.kernels.numerics import FAST
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.kv_cache import PerSequenceState, cache_layout
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf, param_map, safetensors_io
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.models.layers.rope import Positions
from miles.models.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    KimiDeltaSpec,
    MambaSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    ShortConvSpec,
)

MINE = [kind for kind in KINDS if kind.startswith("hybrid")]
RAGGED = (7, 1, 30, 3, 12, 12, 90)


class Kept:
    """An Attend for recurrent layers alone, and the Carry of one sequence after another."""

    latent = False
    levels = ()
    shard = None

    def __init__(self, lengths, state):
        self.lengths, self.state, self.kept = lengths, state, None

    def recurrent_state(self, layer):
        return self

    def update(self, state):
        self.kept = state


def mixer_of(kind, dtype=torch.float64):
    """The first recurrent mixer of a kind, and zeros for one sequence's state."""
    decoder = twin(hf_model(kind), dtype)
    index, spec = next((i, x.mixer) for i, x in enumerate(decoder.spec.layers) if type(x.mixer) in RECURRENT)
    module = getattr(decoder.layers[index], RECURRENT[type(spec)])
    shapes = cache_layout(spec, FAST)
    assert isinstance(shapes, PerSequenceState)
    wide = torch.promote_types(dtype, torch.float32)
    state = [torch.zeros(1, *s, dtype=wide if w else dtype) for s, w in zip(shapes.shapes, shapes.wide, strict=True)]
    return module, tuple(state)


RECURRENT = {GatedDeltaNetSpec: "delta", KimiDeltaSpec: "kda", MambaSpec: "mamba", ShortConvSpec: "short_conv"}
MIXED = [
    "hybrid qwen3 next",
    "hybrid qwen3.5",
    "hybrid nemotron h",
    "hybrid nemotron 3",
    "hybrid kimi linear",
    "hybrid glm 5.3 flash",
    "lfm2 untied with biases, longer convolution",
    "lfm2 moe",
]


# -- going on from a state --------------------------------------------------------------------


@settings(max_examples=examples(20), deadline=None)
@given(kind=st.sampled_from(MIXED), cuts=st.lists(st.integers(0, 100), max_size=6), seed=st.integers(0, 9))
def test_a_sequence_in_parts_is_the_sequence_at_once(kind, cuts, seed):
    module, state = mixer_of(kind)
    x_TD = torch.randn(100, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    at = Positions(torch.arange(100), 256, x_TD.dtype, numerics=FAST)
    with torch.no_grad():
        whole = module(x_TD, at, Kept([100], None))
        edges = [0, *sorted(cuts), 100]
        outs = []
        for first, last in pairwise(edges):
            attend = Kept([last - first], state)
            outs.append(module(x_TD[first:last], at, attend))
            state = attend.kept
    assert relative(torch.cat(outs), whole) <= 1e-10


@pytest.mark.parametrize("kind", MIXED)
def test_nothing_is_kept_where_nobody_asks_and_what_is_kept_has_the_shapes_an_engine_makes_room_for(kind):
    module, state = mixer_of(kind, torch.bfloat16)
    x_TD = torch.randn(5, 32).bfloat16()
    at = Positions(torch.arange(5), 256, x_TD.dtype, numerics=FAST)
    with torch.no_grad():
        silent, asked = Kept([5], None), Kept([5], state)
        outs = [module(x_TD, at, attend) for attend in (silent, asked)]
    assert silent.kept is None
    assert [(t.shape, t.dtype) for t in asked.kept] == [(t.shape, t.dtype) for t in state]
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", MIXED)
def test_recomputing_layers_in_backward_changes_no_gradient(kind):
    decoder = twin(hf_model(kind))
    gradients = []
    for again in (False, True):
        decoder.checkpoint_layers = again
        our_logits(decoder, tokens_of(RAGGED)).logsumexp(-1).sum().backward()
        gradients.append([p.grad for p in decoder.parameters() if p.requires_grad])
        decoder.zero_grad(set_to_none=True)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("kind", MIXED)
def test_bfloat16_is_as_close_to_the_truth_as_transformers_is(kind):
    model = hf_model(kind)
    sequences = tokens_of(RAGGED)
    with torch.no_grad():
        truth = our_logits(twin(model, torch.float64), sequences)
        ours = our_logits(twin(model, torch.bfloat16), sequences)
        theirs = hf_logits(model.to(torch.bfloat16), sequences)
    # Most tokens: one sent to another expert by a rounding is far off, whoever rounds.
    ours_off, theirs_off = ((logits - truth).abs().median() for logits in (ours, theirs))
    assert ours_off <= 1.2 * theirs_off


# -- Qwen3.5 beside its vision tower -----------------------------------------------------------

VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
WHOLE = {
    "dense": (Qwen3_5ForConditionalGeneration, Qwen3_5Config, {}),
    "moe": (Qwen3_5MoeForConditionalGeneration, Qwen3_5MoeConfig, MOE),
}


def seeing(kind, **outer):
    """A small Qwen3.5 with a vision tower."""
    made, config, own = WHOLE[kind]
    torch.manual_seed(0)
    text = SMALL | DELTA | own | {"rope_parameters": MROPE, "eos_token_id": 7}
    model = made(config(text_config=text, vision_config=VISION, attn_implementation="eager", **outer))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.25 * noise)
            if name.endswith(".A_log"):
                parameter.sub_(3)
    return model.eval()


@pytest.mark.parametrize("kind", WHOLE)
def test_the_text_model_beside_a_vision_tower_gives_what_the_whole_model_gives_on_text(kind):
    model = seeing(kind)
    sequences = tokens_of(RAGGED)
    decoder = twin(model)
    with torch.no_grad():
        assert relative(our_logits(decoder, sequences), hf_logits(model, sequences)) <= 1e-5
    assert decoder.spec.eos_token_ids == (7,)


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("stacked", [False, True])
def test_a_checkpoint_with_a_vision_tower_and_layers_ahead_is_read_and_its_text_model_written(kind, stacked, tmp_path):
    model = seeing(kind)
    model.save_pretrained(tmp_path / "whole")
    weights = tmp_path / "whole" / safetensors_io.WEIGHTS
    if stacked:  # as the published ones are
        save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, weights)
    save_file(load_file(weights) | {"mtp.fc.weight": torch.ones(2)}, weights)
    decoder = hf.load(tmp_path / "whole", device="cpu", dtype=torch.float32)
    ours, theirs = dict(decoder.named_parameters()), dict(twin(model).named_parameters())
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    hf.export(decoder, tmp_path / "text", like=tmp_path / "whole")
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "text", attn_implementation="eager", experts_implementation="eager"
    )
    tokens = tokens_of([40])[0][None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_the_whole_model_says_whether_the_head_is_tied():
    tied = seeing("dense", tie_word_embeddings=True)
    assert twin(tied).spec.tie_embeddings
    assert not twin(seeing("dense")).spec.tie_embeddings


def test_a_config_without_a_text_model_is_refused():
    with pytest.raises(UsageError, match=r"text_config of config\.json is missing"):
        spec_from_config({"architectures": ["Qwen3_5ForConditionalGeneration"]})


# -- configs ----------------------------------------------------------------------------------

QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"],
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "vocab_size": 151936,
}
QWEN35_27B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "tie_word_embeddings": False,
    "text_config": {
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 24,
        "num_hidden_layers": 64,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "vocab_size": 248320,
    },
}
NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"],
    "conv_kernel": 4,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_groups": 8,
    "n_routed_experts": 128,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "routed_scaling_factor": 2.5,
    "ssm_state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "time_step_min": 0.001,
    "vocab_size": 131072,
}


SMALL_LFM2 = SMALL | LFM2_MOE | {"architectures": ["Lfm2MoeForCausalLM"]}
KIMI_LINEAR_48B = load_known_models()["Kimi-Linear-48B-A3B-Instruct"]


def test_qwen3_next_80b_has_the_size_it_is_known_by():
    spec = spec_from_config(QWEN3_NEXT_80B)
    assert sum(isinstance(layer.mixer, AttentionSpec) for layer in spec.layers) == 12
    assert isinstance(spec.layers[3].mixer, AttentionSpec)
    assert spec.layers[3].mixer.rope.dim == 64
    assert round(params.parameter_count(spec) / 1e9, 1) == 79.7
    assert Decoder(spec, device="meta", dtype=torch.bfloat16).layers[0].delta.qkvz.weight.shape == (12288, 2048)


def test_qwen35_27b_has_the_size_it_is_known_by():
    spec = spec_from_config(QWEN35_27B)
    assert round(params.parameter_count(spec) / 1e9, 1) == 26.9
    assert spec.eos_token_ids == (248044,)
    assert safetensors_io.config_dtype(QWEN35_27B) == "bfloat16"
    assert spec.layers[0].mixer == GatedDeltaNetSpec(
        key_heads=16, value_heads=48, key_dim=128, value_dim=128, kernel=4, fused=False
    )


def test_nemotron_3_nano_has_the_size_it_is_known_by():
    spec = spec_from_config(NEMOTRON_3_NANO)
    kinds = [type(layer.mixer or layer.ffn) for layer in spec.layers]
    assert [kinds.count(kind) for kind in (MambaSpec, MoeSpec, AttentionSpec, MlpSpec)] == [23, 23, 6, 0]
    assert round(params.parameter_count(spec) / 1e9, 1) == 31.6
    assert spec.layers[0].mixer.step_limit == (0.0, float("inf"))


def test_kimi_linear_48b_has_the_size_it_is_known_by():
    spec = spec_from_config(KIMI_LINEAR_48B)
    assert [i for i, layer in enumerate(spec.layers) if isinstance(layer.mixer, MlaSpec)] == [3, 7, 11, 15, 19, 23, 26]
    assert spec.layers[0].mixer == KimiDeltaSpec(num_heads=32, head_dim=128, kernel=4)
    assert [type(layer.ffn) for layer in spec.layers] == [MlpSpec] + 26 * [MoeSpec]
    assert spec.max_positions == 1048576
    assert round(params.parameter_count(spec) / 1e9, 1) == 49.1


def test_kimi_linear_layers_are_read_from_the_numbers_of_the_published_config_or_from_a_list():
    published = spec_from_config(KIMI_LINEAR_48B)
    linear = KIMI_LINEAR_48B["linear_attn_config"]
    kinds = ["linear_attention" if i in linear["kda_layers"] else "full_attention" for i in range(1, 28)]
    flat = {key: value for key, value in KIMI_LINEAR_48B.items() if key != "linear_attn_config"}
    assert spec_from_config(flat | {"layer_types": kinds}) == published


def test_positions_of_pictures_do_not_change_the_rotation_of_text():
    plain = {key: value for key, value in MROPE.items() if not key.startswith("mrope")}
    own = SMALL | DELTA | {"architectures": ["Qwen3_5ForCausalLM"]}
    assert spec_from_config(own | {"rope_parameters": MROPE}) == spec_from_config(own | {"rope_parameters": plain})


def test_nemotron_layers_may_be_a_pattern_or_a_list_under_old_names_or_new():
    own = SMALL | NEMOTRON | {"architectures": ["NemotronHForCausalLM"]}
    wanted = spec_from_config(own | {"hybrid_override_pattern": "M-*M"})
    for key, kinds in (
        ("layers_block_type", ["mamba", "mlp", "attention", "mamba"]),
        ("layers_block_type", ["linear_attention", "mlp", "full_attention", "linear_attention"]),
        ("layer_types", ["linear_attention", "mlp", "full_attention", "linear_attention"]),
    ):
        assert spec_from_config(own | {key: kinds}) == wanted
    older = {"mamba_n_groups": 1, "mamba_d_conv": 3, "mamba_conv_bias": False}
    newer = {"n_groups": 1, "conv_kernel": 3, "use_conv_bias": False}
    pattern = {"hybrid_override_pattern": "M-*M"}
    assert spec_from_config(own | older | pattern) == spec_from_config(own | newer | pattern) != wanted


@pytest.mark.parametrize("most", [float("inf"), {"__float__": "Infinity"}, 2])
def test_an_endless_step_is_read_however_it_is_written(most):
    own = SMALL | NEMOTRON | {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*"}
    limit = spec_from_config(own | {"time_step_limit": [0.5, most]}).layers[0].mixer.step_limit
    assert limit == (0.5, 2.0 if most == 2 else float("inf"))


def test_steps_are_no_shorter_than_the_config_allows():
    model = hf_model("hybrid nemotron h", time_step_min=0.7, time_step_limit=(0.7, float("inf")))
    sequences = tokens_of(RAGGED)
    with torch.no_grad():
        limited = our_logits(twin(model), sequences)
        free = our_logits(twin(hf_model("hybrid nemotron h")), sequences)
        assert relative(limited, hf_logits(model, sequences)) <= 1e-5
    assert relative(limited, free) > 1e-2


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (QWEN3_NEXT_80B, "hidden_act", "gelu"),
        (QWEN3_NEXT_80B, "linear_num_key_heads", 5),
        (QWEN3_NEXT_80B, "layer_types", ["mystery"] * 48),
        (QWEN3_NEXT_80B, "attn_output_gate", False),
        (NEMOTRON_3_NANO, "hybrid_override_pattern", "MX"),
        (NEMOTRON_3_NANO, "hybrid_override_pattern", None),
        (NEMOTRON_3_NANO, "mlp_hidden_act", "silu"),
        (NEMOTRON_3_NANO, "attention_bias", True),
        (NEMOTRON_3_NANO, "n_groups", 7),
        (NEMOTRON_3_NANO, "n_group", 3),
        (NEMOTRON_3_NANO, "time_step_limit", [1.0]),
        (NEMOTRON_3_NANO, "time_step_limit", [2.0, 1.0]),
        (NEMOTRON_3_NANO, "sliding_window", 128),
        (NEMOTRON_3_NANO, "tie_word_embeddings", True),
        (SMALL_LFM2, "layer_types", None),
        (SMALL_LFM2, "layer_types", ["conv", "mamba", "conv"]),
        (SMALL_LFM2, "num_experts_per_tok", 7),
        (SMALL_LFM2, "conv_L_cache", 0),
        (KIMI_LINEAR_48B, "mla_use_nope", False),
        (KIMI_LINEAR_48B, "mla_use_output_gate", True),
        (KIMI_LINEAR_48B, "num_nextn_predict_layers", 1),
        (KIMI_LINEAR_48B, "layer_types", ["mystery"] * 27),
        (KIMI_LINEAR_48B, "linear_attn_config", {"full_attn_layers": [1], "kda_layers": [2]}),
    ],
)
def test_what_is_not_implemented_is_refused_by_its_key(base, key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json"):
        spec_from_config(base | {key: value})


def test_a_variant_of_kimi_delta_attention_that_is_not_implemented_is_refused():
    linear = KIMI_LINEAR_48B["linear_attn_config"] | {"use_full_rank_gate": True}
    with pytest.raises(UsageError, match=r"^linear_attn_config\.use_full_rank_gate of config\.json is True"):
        spec_from_config(KIMI_LINEAR_48B | {"linear_attn_config": linear})


def glm5_next_like(**changes):
    """The config of a small GLM-5.3 as transformers writes it, with changes of its text model."""
    config = glm5_next_config(**(SMALL | GLM5_NEXT)).to_dict() | {"architectures": ["Glm5NextForConditionalGeneration"]}
    return config | {"text_config": config["text_config"] | changes}


def test_glm_5_3_reads_the_older_names_of_its_layers_and_of_linear_attention():
    spec = spec_from_config(glm5_next_like())
    assert isinstance(spec.layers[0].mixer, KimiDeltaSpec) and spec.layers[0].mixer.lower_bound == -5.0
    assert spec.layers[1].mixer.indexer.pool == 4 and spec.layers[1].mixer.rope is None
    assert spec.streams == 3 and spec.layers[0].hyper.iterations == 4
    older = glm5_next_like(layer_types=["linear_attention", "full_attention"] * 2)
    assert spec_from_config(older) == spec
    group = {"head_dim": 8, "num_heads": 2, "short_conv_kernel_size": 4, "gate_lower_bound": -3.0}
    bound = spec_from_config(glm5_next_like(linear_attn_config=group)).layers[0].mixer
    assert bound == replace(spec.layers[0].mixer, lower_bound=-3.0)


def test_glm_5_3_leaves_its_tower_and_the_layers_that_guess_ahead_alone():
    spec = spec_from_config(glm5_next_like())
    assert param_map.is_ignorable(spec, "model.visual.patch_embed.proj.weight")
    assert param_map.is_ignorable(spec, "model.language_model.layers.4.eh_proj.weight")
    assert not param_map.is_ignorable(spec, "model.language_model.layers.3.eh_proj.weight")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("qk_rope_head_dim", 4),
        ("q_lora_rank", None),
        ("index_topk", 13),
        ("index_kpool_always_select_tail", False),
        ("swiglu_limit", None),
        ("linear_lower_bound", 1.0),
        ("indexer_types", ["full", "shared", "full", "full"]),
        ("indexer_types", ["full"]),
        ("layer_types", ["sliding_attention"] * 4),
    ],
)
def test_what_glm_5_3_does_not_do_is_refused_by_the_name_of_its_key(key, value):
    with pytest.raises(UsageError, match=rf"^{key} of config\.json"):
        spec_from_config(glm5_next_like(**{key: value}))


def test_glm_5_3_can_be_exact_and_split_over_context_ranks():
    spec = spec_from_config(glm5_next_like())
    assert check_batch_invariance(spec) is None
    assert ParallelDims(world=2, context=2).find_model_problem(spec) is None


def test_defaults_left_out_of_a_config_are_those_of_transformers():
    reported = NemotronHConfig(**SMALL | {"layers_block_type": ["mamba", "attention"]}).to_dict()
    reported = {key: value for key, value in reported.items() if value is not None}
    bare = {key: reported[key] for key in (*(SMALL.keys() & reported.keys()), "layers_block_type")}
    arch = {"architectures": ["NemotronHForCausalLM"]}
    assert replace(spec_from_config(reported | arch), eos_token_ids=()) == spec_from_config(bare | arch)


@pytest.mark.parametrize(("config", "own"), [(Lfm2Config, LFM2), (Lfm2MoeConfig, LFM2_MOE)])
def test_what_an_lfm2_config_leaves_out_is_what_transformers_takes(config, own):
    theirs = config(**(SMALL | own)).to_dict() | {"architectures": [config.__name__.replace("Config", "ForCausalLM")]}
    ours = {"architectures": theirs["architectures"]} | SMALL | own
    assert spec_from_config(ours) == replace(spec_from_config(theirs), eos_token_ids=())


def test_an_lfm2_config_may_have_the_older_names_of_its_keys():
    config = SMALL | LFM2 | {"architectures": ["Lfm2ForCausalLM"]}
    newer = config | {"tie_word_embeddings": False, "intermediate_size": 99}
    older = config | {"tie_embedding": False, "block_ff_dim": 99, "layer_types": None, "full_attn_idxs": [1]}
    assert spec_from_config(older) == spec_from_config(newer)
    assert spec_from_config(newer).layers[0].ffn == MlpSpec(size=256)
