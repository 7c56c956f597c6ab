"""Rotary positions against transformers' own frequencies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.models.oracle import assemble, gradients, hf_logits, hf_model, our_logits, relative, tokens_of, twin
from tests.models.small_families.dense import LONGROPE
from transformers import GlmConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.kernels.numerics import FAST
from miles.models.families import spec_from_config
from miles.models.layers import rope
from miles.models.spec import RopeSpec

LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 4096}


def factors(count, slope):
    return [1.0 + slope * i / 7 for i in range(count)]


def read(config, architecture):
    """What we make of a transformers config: its rotation, a head's channels, and its longest sequence."""
    spec = spec_from_config(config.to_dict() | {"architectures": [architecture]})
    return spec.layers[0].mixer.rope, spec.layers[0].mixer.head_dim, spec.max_positions


def same(read_, theirs, scale):
    spec, head_dim, longest = read_
    assert torch.equal(rope.compute_inv_freq(spec, spec.dim or head_dim, longest), theirs)
    assert spec.scale == scale


@pytest.mark.parametrize(
    "given_",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.3},
        LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
        LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 1024},
        YARN,
        YARN | {"truncate": False, "beta_fast": 24, "beta_slow": 2.5},
        YARN | {"mscale": 0.707, "mscale_all_dim": 1.0, "factor": 40.0, "original_max_position_embeddings": 4096},
        YARN | {"mscale": 0.707},
        YARN | {"attention_factor": 0.8},
        YARN | {"factor": 0.5},
        YARN | {"rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 7},
        YARN | {"original_max_position_embeddings": None},
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_those_of_transformers_to_the_bit(given_, head_dim):
    given_ = {key: value for key, value in given_.items() if value is not None}
    sizes = {"hidden_size": 4 * head_dim, "num_attention_heads": 4, "max_position_embeddings": 4096}
    config = LlamaConfig(**sizes, rope_parameters=given_)
    theirs, scale = ROPE_INIT_FUNCTIONS[given_["rope_type"]](config, "cpu")
    same(read(config, "LlamaForCausalLM"), theirs, scale)


@pytest.mark.parametrize("more", [{}, {"factor": 16.0}, {"attention_factor": 1.25}])
@pytest.mark.parametrize("longest", [2048, 4096, 4097, 131072])
def test_longrope_is_long_where_the_model_may_go_beyond_the_original_length(longest, more):
    given_ = LONG | {"short_factor": factors(32, 0.1), "long_factor": factors(32, 3.0)} | more
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=longest, rope_parameters=given_
    )
    theirs, scale = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=longest)
    same(read(config, "LlamaForCausalLM"), theirs, scale)


@pytest.mark.parametrize("part", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("given_", [{"rope_type": "default", "rope_theta": 1e4}, YARN, LONG])
def test_part_of_a_head_turns_as_in_transformers(given_, part):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 131072}
    if given_ is LONG:
        count = int(64 * part) // 2
        given_ = LONG | {"short_factor": factors(count, 0.1), "long_factor": factors(count, 3.0)}
        given_ = given_ | {"partial_rotary_factor": part}
        config = Phi3Config(**sizes, rope_parameters=given_, pad_token_id=None)
        read_ = read(config, "Phi3ForCausalLM")
    else:
        config = GlmConfig(**sizes, head_dim=64, rope_parameters=given_ | {"partial_rotary_factor": part})
        read_ = read(config, "GlmForCausalLM")
    assert read_[0].dim == int(64 * part)
    theirs = 1.0 / (1e4 ** (torch.arange(0, read_[0].dim, 2).float() / read_[0].dim)), 1.0
    if given_["rope_type"] != "default":
        theirs = ROPE_INIT_FUNCTIONS[given_["rope_type"]](config, "cpu", seq_len=131072)
    same(read_, *theirs)


def test_a_model_with_long_factors_equals_transformers_on_sequences_that_are_long():
    """Shorter ones differ by intent: transformers changes factors when a sequence grows, and we never do."""
    model = hf_model("phi3 longrope, short", original_max_position_embeddings=32, rope_parameters=dict(LONGROPE))
    decoder = twin(model)
    assert decoder.spec.layers[0].mixer.rope.scale > 1
    sequences = tokens_of((40, 33, 90))
    theirs, ours = hf_logits(model, sequences), our_logits(decoder, sequences)
    assert relative(ours, theirs) <= 1e-5
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    for logits in (theirs, ours):
        (logits.log_softmax(-1) * weights).sum().backward()
    wanted = assemble(decoder.spec, gradients(model))
    assert all(relative(p.grad, wanted[name]) <= 1e-4 for name, p in decoder.named_parameters())


def test_a_context_too_long_for_a_table_is_turned_by_the_same_angles():
    spec = RopeSpec(theta=10000.0)
    positions = torch.tensor([0, 1, 17, 100_000, 131_071])
    table = rope.compute_cos_sin(spec, 64, 1 << 17, positions, torch.float32, numerics=FAST)
    angles = rope.compute_cos_sin(spec, 64, (1 << 17) + 1, positions, torch.float32, numerics=FAST)
    assert torch.allclose(table, angles, rtol=0, atol=1e-6)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 100), st.booleans(), st.sampled_from([None, 4, 10]))
def test_only_the_distance_of_two_tokens_counts(here, there, shift, interleaved, dim):
    spec = RopeSpec(theta=100.0, interleaved=interleaved, dim=dim)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, generator=generator, dtype=torch.float64)

    def score(a, b):
        turns = rope.compute_cos_sin(spec, dim or 16, 512, torch.tensor([a, b]), torch.float64, numerics=FAST)
        turned = (
            rope.apply_rotary(x, turn, interleaved=interleaved, numerics=FAST)
            for x, turn in ((q, turns[:1]), (k, turns[1:]))
        )
        return torch.stack(list(turned)).prod(0).sum()

    assert abs(float(score(here, there) - score(here + shift, there + shift))) < 1e-3


def test_neighbours_and_halves_are_one_rotation_of_channels_in_another_order():
    x = torch.randn(5, 2, 12, generator=torch.Generator().manual_seed(0))
    positions, order = torch.tensor([0, 1, 7, 30, 99]), torch.arange(12).view(2, 6).T.flatten()
    halves, pairs = (
        rope.compute_cos_sin(
            RopeSpec(theta=50.0, scale=1.5, interleaved=mixed), 12, 128, positions, torch.float32, numerics=FAST
        )
        for mixed in (False, True)
    )
    assert torch.equal(
        rope.apply_rotary(x, halves, numerics=FAST)[..., order],
        rope.apply_rotary(x[..., order], pairs, interleaved=True, numerics=FAST),
    )


def test_queries_sharpen_every_so_many_positions():
    at = rope.Positions(torch.tensor([0, 7, 8, 15, 16]), 64, torch.float32, numerics=FAST)
    ln2, ln3 = torch.tensor([2.0, 3.0]).log().tolist()
    assert at.temperature(8.0, 0.5, 0.0).flatten().tolist() == pytest.approx(
        [1, 1, 1 + ln2 / 2, 1 + ln2 / 2, 1 + ln3 / 2]
    )
    assert at.temperature(8.0, 0.5).flatten().tolist() == pytest.approx(
        [1, 1 + ln2 / 2, 1 + ln2 / 2, 1 + ln3 / 2, 1 + ln3 / 2]
    )
