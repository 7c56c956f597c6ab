"""Rotary positions against transformers' own frequencies."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from miles.models import rope
from miles.models.spec import RopeSpec


@pytest.mark.parametrize(
    "given_",
    [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 1024,
        },
    ],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_frequencies_equal_those_of_transformers_to_the_bit(given_, head_dim):
    config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, rope_parameters=dict(given_))
    theirs, _ = ROPE_INIT_FUNCTIONS[given_["rope_type"]](config, "cpu")
    spec = RopeSpec(
        theta=given_["rope_theta"],
        kind=given_["rope_type"],
        factor=given_["factor"],
        low_freq_factor=given_.get("low_freq_factor", 1.0),
        high_freq_factor=given_.get("high_freq_factor", 4.0),
        original_max_positions=given_.get("original_max_position_embeddings", 8192),
    )
    assert torch.equal(rope.frequencies(spec, head_dim), theirs)


def test_a_context_too_long_for_a_table_is_turned_by_the_same_angles():
    spec = RopeSpec(theta=10000.0)
    positions = torch.tensor([0, 1, 17, 100_000, 131_071])
    table = rope.rotation(spec, 64, 1 << 17, positions, torch.float32)
    angles = rope.rotation(spec, 64, (1 << 17) + 1, positions, torch.float32)
    assert torch.allclose(table, angles, rtol=0, atol=1e-6)


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 100))
def test_only_the_distance_of_two_tokens_counts(here, there, shift):
    spec = RopeSpec(theta=100.0)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, generator=generator, dtype=torch.float64)

    def score(a, b):
        turns = rope.rotation(spec, 16, 512, torch.tensor([a, b]), torch.float64)
        return (rope.rotate(q, turns[:1]) * rope.rotate(k, turns[1:])).sum()

    assert abs(float(score(here, there) - score(here + shift, there + shift))) < 1e-3
